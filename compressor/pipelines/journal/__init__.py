"""Journal and resume: each finished stage of a run is kept in a run folder, so that the run survives being killed.

journal.py      what the pipelines tell it      opening.py      a new run begins, or an old one goes on
run_folder.py   name, lock, who may use it      lines.py        the append-only file of checksummed lines
stage_files.py  one stage on disk               fingerprint.py  what the result depends on, and how two runs differ
"""

from __future__ import annotations

from compressor.pipelines.journal.fingerprint import base_hashes, data_identity, digest, fingerprint, model_identity, versions
from compressor.pipelines.journal.journal import Journal, NoJournal
from compressor.pipelines.journal.opening import discard_finished, open_journal
from compressor.pipelines.journal.run_folder import check_run_dir, default_run_dir

__all__ = [
    "Journal",
    "NoJournal",
    "base_hashes",
    "check_run_dir",
    "data_identity",
    "default_run_dir",
    "digest",
    "discard_finished",
    "fingerprint",
    "model_identity",
    "open_journal",
    "versions",
]
