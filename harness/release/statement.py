"""What was signed off, as an in-toto statement; and whether a folder is still that.

The form is in-toto's Statement v1 (github.com/in-toto/attestation, spec/v1/statement.md) with the predicate test-result v0.1, whose readers
pass over fields that they do not know: ours are `verdict`, `waivers` and `versions`. Nothing is signed here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Mapping, Sequence
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from compressor.errors import UserInputError
from compressor.json_text import from_json, to_json
from harness.release.files import contents, differences
from harness.release.policy import Waiver, is_waivable
from harness.release.report import ReleaseReport
from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome, Verdict
from harness.settings_file import not_allowed
from harness.validation.format.files import TOKENIZER, TOKENIZER_FILES

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://in-toto.io/attestation/test-result/v0.1"

FILES = Claim("statement.files", "Every file is the one that was signed off, and there is no other")
RESULT = Claim("statement.result", "The sign-off passed, and no waiver that it took has ended")

_RESULTS = {Verdict.PASS: "PASSED", Verdict.REGRESSION: "FAILED", Verdict.INCONCLUSIVE: "WARNED"}
_Name = Annotated[str, Field(pattern=r"\S")]
_FROZEN = ConfigDict(frozen=True)  # unknown fields are passed over, as in-toto asks


class Digest(BaseModel):
    """Of a file."""

    model_config = _FROZEN
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Resource(BaseModel):
    """A file or another thing with a digest."""

    model_config = _FROZEN
    name: _Name
    digest: Digest


class Predicate(BaseModel):
    """What was found."""

    model_config = _FROZEN
    result: Literal["PASSED", "WARNED", "FAILED"]
    configuration: tuple[Resource, ...]
    passed: Annotated[tuple[_Name, ...], Field(alias="passedTests")]
    warned: Annotated[tuple[_Name, ...], Field(alias="warnedTests")]
    failed: Annotated[tuple[_Name, ...], Field(alias="failedTests")]
    verdict: Verdict
    waivers: dict[str, Waiver]
    versions: Annotated[dict[_Name, _Name], Field(min_length=1)]

    @field_validator("configuration")
    @classmethod
    def _names_what_it_rests_on(cls, found: tuple[Resource, ...]) -> tuple[Resource, ...]:
        names = [one.name for one in found]
        if len(set(names)) < len(names) or not {"dataset", "policy", "base/config.json"} < set(names) or not _name_weights(names):
            raise ValueError(
                "must name base/config.json, the base's weights (base/model.safetensors, or the index and all its files), the dataset and "
                "the policy, each once"
            )
        return found

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        """All that a sign-off writes follows from its lists, so who reads one field is told what the others tell."""
        verdict, names = _verdict_of(self.passed, self.warned, self.failed, self.waivers), [*self.passed, *self.warned, *self.failed]
        result = _result_of(verdict, self.waivers)
        wrong = {
            f"verdict is {self.verdict.value}, and the tests say {verdict.value}": self.verdict is not verdict,
            f"result is {self.result}, and the tests say {result}": self.result != result,
            "a test stands in two lists": len(set(names)) < len(names),
            "what is waived is not among warnedTests": not self.waivers.keys() <= set(self.warned),
            "what nothing can waive is waived": any(not is_waivable(name) for name in self.waivers),
        }
        if any(wrong.values()):
            raise ValueError(f"contradicts itself: {'; '.join(words for words, is_so in wrong.items() if is_so)}")
        return self


def _name_weights(names: Sequence[str]) -> bool:
    """Whether the weights of the base are among them; files of data may lie beside these. Of shards the names tell how many there are."""
    if "base/model.safetensors" in names:
        return True
    shards = [found for name in names if (found := re.fullmatch(r"base/(.*)-(\d+)-of-(\d+)\.safetensors", name))]
    kinds: dict[tuple[str, str], set[int]] = {}
    for found in shards:
        kinds.setdefault((found[1], found[3]), set()).add(int(found[2]))
    is_whole = all(numbers >= {*range(1, int(total) + 1)} for (_, total), numbers in kinds.items())
    return "base/model.safetensors.index.json" in names and any(name.endswith(".safetensors") for name in names) and is_whole


def _verdict_of(passed: Sequence[str], warned: Sequence[str], failed: Sequence[str], waived: Container[str]) -> Verdict:
    if failed:
        return Verdict.REGRESSION
    return Verdict.PASS if passed and all(name in waived for name in warned) else Verdict.INCONCLUSIVE


def _result_of(verdict: Verdict, waivers: Mapping[str, Waiver]) -> str:
    return "WARNED" if waivers and verdict is Verdict.PASS else _RESULTS[verdict]


class Statement(BaseModel):
    """The part of a statement that is checked."""

    model_config = _FROZEN
    type: Annotated[Literal["https://in-toto.io/Statement/v1"], Field(alias="_type")]
    subject: Annotated[tuple[Resource, ...], Field(min_length=1)]
    predicate_type: Annotated[Literal["https://in-toto.io/attestation/test-result/v0.1"], Field(alias="predicateType")]
    predicate: Predicate

    @model_validator(mode="after")
    def _names_the_tokenizer(self) -> Self:
        """A checkpoint whose tokenizer equalled the base's has no file of it that the base lacks."""
        rests_on = {one.name for one in self.predicate.configuration}
        unnamed = sorted(one.name for one in self.subject if _is_of_tokenizer(one.name) and f"base/{one.name}" not in rests_on)
        if unnamed and TOKENIZER.name in self.predicate.passed:
            raise ValueError(f"says that the tokenizer is the base's, and configuration does not name base/{unnamed[0]}")
        return self


def _is_of_tokenizer(name: str) -> bool:
    return any(name.count("/") == pattern.count("/") and fnmatchcase(name, pattern) for pattern in TOKENIZER_FILES)


def statement_of(report: ReleaseReport) -> dict[str, Any]:
    """Return the statement on a sign-off.

    Args:
        report: of the sign-off.

    Returns:
        JSON types: a subject per file of the checkpoint; base, data, policy and recipe as configuration.
    """
    provenance = report.provenance
    policy = hashlib.sha256(to_json(report.policy.model_dump(mode="json")).encode()).hexdigest()
    configuration = {f"base/{name}": sha256 for name, sha256 in provenance["base"].items()}
    configuration |= {"dataset": provenance["data"]["sha256"], "policy": policy}
    waived = report.names(*Outcome, waived=True)
    return {
        "_type": STATEMENT_TYPE,
        "subject": _resources(provenance["compressed"]),
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "result": _result_of(report.verdict, report.waived),
            "configuration": _resources(configuration),
            "passedTests": report.names(Outcome.PASS),
            "warnedTests": sorted([*report.names(Outcome.INCONCLUSIVE), *waived]),
            "failedTests": report.names(Outcome.FAIL),
            "verdict": report.verdict.value,
            "waivers": {name: waiver.model_dump(mode="json") for name, waiver in report.waived.items()},
            "versions": provenance["versions"],
        },
    }


def _resources(hashes: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in sorted(hashes.items())]


def read_statement(path: Path) -> Statement:
    """Read a statement.

    Args:
        path: of the file.

    Returns:
        What of it is checked.

    Raises:
        UserInputError: it cannot be read, is no statement of this kind, or names a file twice.
    """
    try:
        statement = Statement.model_validate(from_json(path.read_text(encoding="utf-8"), once=True))
    except OSError as error:
        raise UserInputError(f"{path}: cannot be read ({error.strerror}); name the statement.json of a sign-off") from error
    except ValidationError as error:
        raise UserInputError(
            f"{path}: is no statement of a sign-off: {_wrong(dict(error.errors()[0]))}; name its statement.json"
        ) from error
    except ValueError as error:
        raise UserInputError(f"{path}: is not JSON: {error}; name the statement.json of a sign-off") from error
    names = [one.name for one in statement.subject]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserInputError(f"{path}: names {twice[0]} twice; name the statement.json of a sign-off")
    return statement


def _wrong(error: Mapping[str, Any]) -> str:
    place = ".".join(map(str, error["loc"])) or "the file"
    if error["type"] == "missing":
        return f"{place}: is missing"
    if error["type"] == "value_error" and isinstance(error["input"], dict):  # a part that contradicts itself, too long to be shown
        return f"{place}: {error['msg'].removeprefix('Value error, ')}"
    return f"{place}: {not_allowed(error)}"


def verify_statement(statement: str | Path, folder: str | Path, *, today: date) -> list[CheckRecord]:
    """Hold a folder against the statement of its sign-off.

    Args:
        statement: the file.
        folder: the checkpoint, wherever it lies now.
        today: waivers until yesterday do not count.

    Returns:
        A record about the files and one about the result.

    Raises:
        UserInputError: the statement cannot be read, or there is no such folder.
    """
    told, place = read_statement(Path(statement)), Path(folder)
    if not place.is_dir():
        raise UserInputError(f"{place}: no such folder; name the folder of the checkpoint")
    noted = {one.name: one.digest.sha256 for one in told.subject}
    findings = differences(noted, contents(place))
    return [FILES.found(findings, f"{len(noted)} files have their sha256", noun="file"), _result(told.predicate, today)]


def _result(predicate: Predicate, today: date) -> CheckRecord:
    ended = [f"{name}: its waiver ended on {waiver.until}" for name, waiver in predicate.waivers.items() if waiver.until < today]
    if predicate.verdict is Verdict.PASS:
        return RESULT.found(ended, f"{len(predicate.passed)} checks passed, {len(predicate.waivers)} waived", noun="waiver")
    counted = [*predicate.failed, *(name for name in predicate.warned if name not in predicate.waivers)]
    said = f"the sign-off said {predicate.verdict.value}: {', '.join(counted) or 'no check looked'}"
    outcome = Outcome.FAIL if ended else predicate.verdict.outcome  # what was waived counts again
    return RESULT.record(outcome, "; ".join([said, *ended]), findings=(*predicate.failed, *ended))
