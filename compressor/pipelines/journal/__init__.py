"""Journal and resume: each finished stage of a run is kept in a run folder, so that the run survives being killed.

journal.py      what the pipelines tell it      place.py        the folders of one run: a new one begins, or an old one goes on
run_folder.py   name, lock, who may use it      stage_files.py  one stage on disk
shared.py       of several processes            fingerprint.py  what the result depends on, and how two runs differ
"""

from __future__ import annotations

from compressor.pipelines.journal.fingerprint import base_hashes, model_identity, run_fingerprint, run_record
from compressor.pipelines.journal.journal import Journal, NullJournal, StageJournal
from compressor.pipelines.journal.place import RunPlace, check_places
from compressor.pipelines.journal.shared import SharedJournal

__all__ = [
    "Journal",
    "NullJournal",
    "RunPlace",
    "SharedJournal",
    "StageJournal",
    "base_hashes",
    "check_places",
    "model_identity",
    "run_fingerprint",
    "run_record",
]
