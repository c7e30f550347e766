"""The phases of one training run, in order: load the model, read the data, train and save."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compressor.data import BlockOrder, TokenBlocks, check_batches, input_columns, load_blocks, max_positions, open_source
from compressor.data.blocks import IGNORED
from compressor.errors import DatasetError, UserInputError
from compressor.lifecycle import Report, Session, State
from compressor.model.checkpoints.audit import check_unclaimed, contents
from compressor.model.disk_room import check_training_room
from compressor.model.evaluation import check_trainable
from compressor.model.loading.load import LoadedModel, load_model, resolve_device
from compressor.model.saving import CompressedModel, attach_save
from compressor.monitor import Monitor
from compressor.pipelines.journal.fingerprint import base_hashes, model_identity
from compressor.progress import Progress, progress_of
from compressor.random_state import random_numbers_kept
from compressor.settings.verbs import DataSettings, StepSettings
from compressor.training import Trainer, TrainStep, WeightAverages, adamw, warmup_cosine
from compressor.training.step.optimizers import refuse_float16
from compressor.training_run.attention import causal_attention
from compressor.training_run.loop import Loop
from compressor.training_run.place import Place
from compressor.training_run.result import (
    cast_parameters,
    check_saveable,
    save_trained,
    saved_dtype,
    saving_notes,
    sparsities,
    training_record,
)
from compressor.training_run.settings import AUTOCAST, check_recipe, training_fingerprint
from compressor.training_run.states import States

# The loss of a causal language model.


def next_token_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Compute the mean cross entropy of the next token.

    Args:
        model: a causal language model of transformers.
        batch: `labels` and the arguments of the model.

    Returns:
        The mean over all targets, in nats.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    return cross_entropy(logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)


@dataclass(frozen=True)
class TrainResult(CompressedModel):
    """What a training gives back, beside the model.

    Attributes:
        report: what the modifiers did.
        losses: of all steps, those of earlier parts of the run included.
        evaluations: step and held-out losses.
        plans: of the captured steps, the number of operators and of bytes held.
        seconds: wall time by phase (load, data, train, finish).
        resumed: where the run went on; None where it began at the beginning.
    """

    report: Report
    losses: list[float]
    evaluations: list[dict[str, Any]]
    plans: list[dict[str, int]]
    seconds: dict[str, float]
    resumed: str | None


class TrainingRun:
    """The phases of one run, in order: load, read, train."""

    def __init__(
        self, settings: StepSettings, place: Place, recipe: str | None, modifiers: tuple[Any, ...], seed: int, progress: Progress | bool
    ) -> None:
        self.settings, self.place, self.recipe, self.modifiers, self.seed = settings, place, recipe, modifiers, seed
        self.shows = progress is not False
        self.bars = progress_of(progress)
        self.monitor = Monitor()

    def load(
        self, model: str | Path | nn.Module, tokenizer: Any, device: str, model_class: str | None, trust: bool, revision: str | None
    ) -> None:
        """Load the model and identify it before anything is done to it."""
        chosen = resolve_device(device)
        is_default = (
            isinstance(model, nn.Module) and self.settings.dtype == StepSettings.model_fields["dtype"].default
        )  # which says nothing of such a model
        self.loaded: LoadedModel = load_model(
            model,
            dtype="auto" if is_default else self.settings.dtype,
            device=chosen,
            trust_remote_code=trust,
            model_class=model_class,
            revision=revision,
        )
        check_trainable((*self.loaded.model.named_parameters(), *self.loaded.model.named_buffers()))
        self.tokenizer = tokenizer or self.loaded.tokenizer
        self.own_tokenizer = tokenizer
        self.parameters = [p for p in self.loaded.model.parameters() if p.requires_grad and p.is_floating_point()]
        if not self.parameters:
            raise UserInputError(f"{type(self.loaded.model).__name__}: no parameter requires a gradient; nothing would be trained")
        refuse_float16(self.parameters, "train in float32 or bfloat16 (dtype, or model.float()); save_dtype='float16' saves in it")
        self.device = self.parameters[0].device
        if self.loaded.from_memory and device != "auto" and self.device.type != chosen.type:
            raise UserInputError(f"device: {device!r} was given for a model that is on {self.device}; move it first, or leave device out")
        self.save_dtype = saved_dtype(self.loaded, self.settings.save_dtype)
        self.base = base_hashes(self.loaded.source_dir)
        self.identity = model_identity(self.loaded, self.base, tokenizer)
        self.monitor.end_phase("load")

    def read(self, dataset: Any, eval_dataset: Any, max_seq_length: int | None, text_column: str) -> None:
        """Read the data, and settle how long the run is."""
        if dataset is None:
            raise DatasetError("dataset: none was given, and training needs one; pass dataset=")
        model = self.loaded.model
        limit = max_positions(model)

        def blocks(source: Any, name: str, length: int | None) -> TokenBlocks:
            found = load_blocks(
                open_source(source, DataSettings(), batch_size=None, shuffle_seed=None, tokenizer=self.tokenizer, text_column=text_column),
                tokenizer=self.tokenizer,
                max_seq_length=length,
                text_column=text_column,
                max_positions=limit,
                inputs=input_columns(model),
                name=name,
            )
            check_batches(found, model)
            return found

        def held_out(source: Any, length: int) -> TokenBlocks:
            try:
                return blocks(source, "eval_dataset", length)
            except DatasetError as error:  # who reads knows one dataset
                raise DatasetError(re.sub(r"^dataset\b", "eval_dataset", str(error))) from error

        self.data = blocks(dataset, "dataset", max_seq_length)
        length = self.data.input_ids.shape[1]
        self.eval_data = None if eval_dataset is None else held_out(eval_dataset, length)
        settings = self.settings
        several = self.data.input_ids[:1].to(self.device).expand(min(settings.batch_size, 2), -1)
        self.attention = causal_attention(model, several)
        extra = self.attention.arguments
        self.order = BlockOrder(
            self.data,
            batch_size=settings.batch_size,
            accumulate=settings.accumulate,
            seed=self.seed,
            shuffle=settings.shuffle,
            extra=extra,
            device=self.device,
        )
        self.held_out = None
        if self.eval_data is not None:
            size = min(settings.batch_size, len(self.eval_data.input_ids))
            self.held_out = BlockOrder(self.eval_data, batch_size=size, extra=extra, device=self.device, name="eval_dataset")
        self.num_steps = settings.num_steps(self.order.steps_per_epoch)
        self.length = self.num_steps if settings.unit == "steps" else self.num_steps / self.order.steps_per_epoch
        self.monitor.end_phase("data")

    def _data_notes(self) -> list[str]:
        """What of the rows was not read, or is not learnt."""
        given = {"dataset": self.data} | ({} if self.eval_data is None else {"eval_dataset": self.eval_data})
        notes = [
            f"{name}: {data.num_without_target} blocks in which a loss_mask leaves no target are left out"
            for name, data in given.items()
            if data.num_without_target
        ]
        if unread := sorted(frozenset().union(*(data.unread_masks for data in given.values()))):
            notes.append(f"{', '.join(unread)} of the rows is not read, and all tokens are learnt; a loss_mask (1: learnt) says which are")
        return notes

    def train(self) -> TrainResult:
        """Make the steps, end the session, save."""
        notes = [*self.loaded.notes, *check_recipe(self.modifiers, self.length, self.settings.unit), *self._data_notes()]
        notes += saving_notes(self.loaded, self.settings.save_dtype)
        run = training_fingerprint(
            self.identity, self.recipe, self.data, self.eval_data, self.seed, self.settings, self.num_steps, self.device
        )
        state = State(self.loaded.model, self.device, self.seed, Report(notes=notes), keep_originals=self.loaded.from_memory)
        with ExitStack() as held:
            states = held.enter_context(self.place.open(run))
            held.enter_context(_seeded(self.seed))
            flags = held.enter_context(_training_flags(self.loaded.model))
            held.enter_context(self.attention.applied(self.loaded.model))
            self.trained = _all_but_frozen(self.loaded.model)
            self.frozen = contents(self.loaded.model, exempt=self.trained)
            session = held.enter_context(self._session(state)) if self.modifiers else None
            if session is not None:
                session.initialize()
            if self.place.output_dir is not None:
                modifiers = () if session is None else session.modifiers
                state.report.notes += check_saveable(modifiers, self.loaded.model, self.save_dtype)
            self._check_room()
            trainer = self._trainer(session)
            loop = Loop(trainer, self.order, self.held_out, self.num_steps, self.settings, states, shows=self.shows, monitor=self.monitor)
            loop.run()
            plans = [{"operators": len(plan.captured.ops), "bytes": plan.captured.scratch_bytes} for plan in trainer.plans]
            self.monitor.end_phase("train")
            held.enter_context(_told_of_interruption(states, self.place.output_dir))
            check_unclaimed(self.loaded.model, self.frozen, state.claims.keys() | state.touched, self.trained)
            self._settle(trainer, flags)
            if session is not None:
                session.finalize()
            if self.held_out is not None:
                batches, weights = self.held_out.in_order()
                loop.evaluations.append({"step": self.num_steps, "as_saved": True, "loss": trainer.evaluate(batches, weights)})
            record = self.loaded.source_record | training_record(
                run, self.base, loop.losses, loop.evaluations, sparsities(self.loaded.model), state.report, self.attention.words
            )
            folder = save_trained(self.loaded, self.own_tokenizer, self.place.output_dir, record, states.token)
            states.finish()
            attach_save(self.loaded.model, record)
            self.monitor.end_phase("finish")
        return TrainResult(
            self.loaded.model,
            self.tokenizer,
            record,
            folder,
            self.loaded.source_dir if self.own_tokenizer is None else None,
            state.report,
            loop.losses,
            loop.evaluations,
            plans,
            self.monitor.seconds,
            states.resumed,
        )

    def _check_room(self) -> None:
        interval = self.settings.save_interval(self.num_steps)
        num_states = 0 if not interval else min(3, -(-self.num_steps // interval))  # the last two, and the one that is being written
        itemsize = None if self.save_dtype is None else self.save_dtype.itemsize
        check_training_room(self.loaded.model, itemsize, len(self.settings.ema), num_states, self.place.output_dir, self.place.run_dir)

    def _session(self, state: State) -> Session:
        return Session(state, self.modifiers, None if self.settings.unit == "steps" else self.order.steps_per_epoch)

    def _trainer(self, session: Session | None) -> Trainer:
        settings, model = self.settings, self.loaded.model
        matrices, others = ([p for p in self.parameters if (p.dim() >= 2) is wanted] for wanted in (True, False))
        groups = [
            {"params": params, "weight_decay": decay} for params, decay in ((matrices, settings.weight_decay), (others, 0.0)) if params
        ]
        step = TrainStep(
            model,
            next_token_loss,
            adamw(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay),
            session,
            accumulate=settings.accumulate,
            clip_norm=settings.clip_norm or None,
            autocast=AUTOCAST[settings.autocast],
            averages=WeightAverages(model, settings.ema, warmup=settings.ema_warmup) if settings.ema else None,
        )
        return Trainer(
            step,
            settings.mode,
            schedule=warmup_cosine(settings.warmup_steps, self.num_steps),
            check_every=settings.check_every,
            audit_every=settings.audit_every,
            progress=self.bars,
        )

    def _settle(self, trainer: Trainer, flags: dict[nn.Module, bool]) -> None:
        """Bring the weights to what is saved: averages if asked, the checkpoint's dtype; and let go of what only training needs."""
        trainer.forget_plans()
        averages = trainer.step.averages
        if averages is not None and self.settings.save_ema is not None:
            averages.copy_into_model(self.settings.save_ema)
        for parameter in self.parameters:
            parameter.grad = None
        cast_parameters(self.loaded.model, self.save_dtype)
        for module, training in flags.items():
            module.training = training


def _all_but_frozen(model: nn.Module) -> frozenset[str]:
    """Names of all stored tensors but parameters that nobody trains; buffers such as running means change with every step."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not (p.requires_grad and p.is_floating_point())}
    return frozenset(model.state_dict().keys() - frozen)


@contextmanager
def _told_of_interruption(states: States, output_dir: Path | None) -> Iterator[None]:
    """Say of ctrl-C behind the last step what is kept."""
    try:
        yield
    except KeyboardInterrupt as error:
        is_whole = output_dir is not None and output_dir.is_dir() and any(output_dir.iterdir())  # it appears whole or not at all
        error.add_note(f"the checkpoint in {output_dir} is whole" if is_whole else f"stopped behind the last step; {states.advice}")
        raise


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators of torch and Python; in the end all stand where they stood."""
    with random_numbers_kept(devices="all"):
        torch.manual_seed(seed)
        random.seed(seed)
        yield


@contextmanager
def _training_flags(model: nn.Module) -> Iterator[dict[nn.Module, bool]]:
    """Put a model into training mode, and its modules back to what they were."""
    flags = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield flags
    finally:
        for module, training in flags.items():
            module.training = training
