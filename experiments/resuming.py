"""Trainings that go on where their last checkpoint was, exactly."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ecospec_jax import UserError
from ecospec_jax.errors import reported_as_user_error
from ecospec_jax.training.trainer import Trainer
from experiments.tables import write_text


def training_folder(out: Path) -> Path:
    """Where the unfinished training of `out` is kept."""
    return out.with_name(f"{out.name}.training")


def open_training(folder: Path, recipe: dict[str, Any]) -> None:
    """Begins a training folder, or checks that the one there belongs to a training of the same recipe."""
    file = folder / "recipe.json"
    with reported_as_user_error(f"{file}: cannot be used", OSError, ValueError):
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(recipe))
        elif json.loads(file.read_text()) != recipe:
            raise UserError(
                f"{folder}: holds an unfinished training with other settings or data; "
                "continue that one, or remove the folder"
            )


class Patience:
    """Early stopping: what was trained at the best judgement, and whether too many since were no better."""

    def __init__(self, trainer: Trainer, judgements: int) -> None:
        """Is over after `judgements` in a row that were no better than the best before them."""
        self.trainer, self.judgements = trainer, judgements
        self._best, self._score, self._stale = self._trained(), -np.inf, 0

    def _trained(self) -> Any:
        return jax.tree.map(np.array, self.trainer.state["trained"])  # copies: a step gives the buffers up

    def judge(self, score: float) -> None:
        """Takes note of a judgement of the present values; more is better."""
        if score > self._score:
            self._best, self._score, self._stale = self._trained(), score, 0
        else:
            self._stale += 1

    @property
    def over(self) -> bool:
        """Whether to stop."""
        return self._stale >= self.judgements

    def take_best(self) -> None:
        """Gives the trainer the best values."""
        self.trainer.restore(self.trainer.state | {"trained": self._best})

    @property
    def state(self) -> Any:
        """What a checkpoint must hold, the trainer's state included."""
        best = {"best": self._best, "score": np.array(self._score), "stale": np.array(self._stale)}
        return {"training": self.trainer.state, **best}

    def restore(self, state: Any) -> None:
        """Takes up a `state`."""
        self.trainer.restore(state["training"])
        self._best, self._score, self._stale = state["best"], float(state["score"]), int(state["stale"])


def train(
    trainer: Trainer,
    feed: Callable[[int], Iterator[Any]],
    *,
    steps: int,
    checkpoints: Path,
    every: int,
    report: Callable[[int, float], None],
    console: Console,
    patience: Patience | None = None,
) -> None:
    """Trains up to step `steps` from the last checkpoint on.

    Args:
        trainer: left with the final values.
        feed: endless batches from a step (counted from 0) on.
        steps: optimiser steps from the very beginning.
        checkpoints: folder of this training's checkpoints.
        every: steps between checkpoints, each with a report; there is one after the last step too.
        report: gets the step and its loss.
        console: where progress is shown.
        patience: of this trainer; `report` tells it about judgements, and it may end the training earlier.
    """
    kept = trainer if patience is None else patience
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(checkpoints.absolute(), options=options) as manager:
        done = manager.latest_step() or 0
        if done:
            where = f"{checkpoints}: cannot resume; remove it to start again"
            with reported_as_user_error(where, ValueError, KeyError):
                kept.restore(manager.restore(done, args=ocp.args.StandardRestore(kept.state)))
        if done >= steps or (patience is not None and patience.over):
            return
        if done:
            console.print(f"resuming after step {done}")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("training", total=steps, completed=done)
            upcoming = feed(done)
            for step in range(done + 1, steps + 1):
                loss = trainer.step(next(upcoming))
                progress.update(task, advance=1)
                if step % every == 0 or step == steps:
                    report(step, float(loss))
                    manager.save(step, args=ocp.args.StandardSave(kept.state))
                    if patience is not None and patience.over:
                        console.print(f"stopped after step {step}: no better for {patience.judgements} judgements")
                        return
