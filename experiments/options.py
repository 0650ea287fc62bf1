"""Options that several jobs share, and checks of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ecospec_jax import SpecConfig, UserError
from ecospec_jax.distributed import Cluster


@dataclass(frozen=True)
class ModelOptions:
    """What decodes."""

    target: Path | None = None
    """Folder that `python -m convert` wrote."""
    drafter: Path | None = None
    """Take the drafter from this converted folder instead of the target's own."""
    predictor: Path | None = None
    """Folder of expert predictors that `python -m experiments.train_predictor` wrote."""
    random_weights: str | None = None
    """Instead of a target: random weights of this published shape, e.g. qwen3-30b-a3b; text becomes UTF-8 bytes."""
    layers: int | None = None
    """With random weights: number of layers."""
    acceptance: float | None = None
    """With random weights: how often a node's likeliest child is accepted, whatever the target says, so that whole
    steps can be timed; the answers are then not the target's."""
    cost: Path | None = None
    """Cost model that `python -m experiments.fit_cost` wrote, for methods that weigh costs (rate, rate-table); without
    it they weigh bytes."""
    pad_ffn: int = 0
    """Memory-bound mode: hidden units to add to every expert without changing its output, so that no cache holds the
    experts."""
    layout: str | None = None
    """Mesh layout of the target, such as tp8, ep8, tp4ep2 or dp_attn+ep8; one device if not given."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Compute dtype; auto is float32 on CPU and bfloat16 on accelerators."""
    seed: int = 0
    """Seed of sampling and of random weights; each prompt draws from its own stream."""


@dataclass(frozen=True)
class ClusterOptions:
    """Several processes."""

    distributed: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """This is one of several processes, whose devices together serve the layout. All are started alike."""
    coordinator: str | None = None
    """HOST:PORT at which process 0 can be reached. Under Slurm and Open MPI this and the next two can be left out."""
    processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Which of them this is, from 0."""
    connect_seconds: int = Cluster.connect_seconds
    """How long each process waits for the others at the start."""

    @property
    def cluster(self) -> Cluster | None:
        given = Cluster(self.coordinator, self.processes, self.process_id, self.connect_seconds)
        if self.distributed:
            return given
        if given != Cluster():
            raise UserError("--coordinator, --processes, --process-id and --connect-seconds go with --distributed")
        return None


@dataclass(frozen=True)
class TreeOptions:
    """Trees, and what the cost-aware score takes as paid for."""

    depth: int = SpecConfig.depth
    """Token levels of the candidate tree."""
    branch: int = SpecConfig.branch
    """Children of each expanded node."""
    budget: int = SpecConfig.budget
    """Candidate nodes verified beside the root."""
    eps: float = SpecConfig.eps
    """Cost-aware score: added to the count of new experts."""
    buffer: Literal["empty", "root", "previous"] = SpecConfig.buffer
    """Experts that count as paid for before any node is chosen."""
    shared_buffer: bool = False
    """One expert buffer for the whole batch instead of one a sequence."""
    device_experts: int | None = SpecConfig.device_experts
    """With experts split by id, as ep8 does: how many a device has. The cost-aware score then counts what a node adds
    to the busiest device."""

    @property
    def spec(self) -> SpecConfig:
        return SpecConfig(
            depth=self.depth,
            branch=self.branch,
            budget=self.budget,
            eps=self.eps,
            buffer=self.buffer,
            shared_buffer=self.shared_buffer,
            device_experts=self.device_experts,
        )


def require_positive(settings: Any, *names: str) -> None:
    """Each of these options must be at least 1, or not given."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")


def named_paths(named: Sequence[str], name_of: Callable[[Path], str], *, malformed: str, twice: str) -> dict[str, Path]:
    """Paths by name, from `NAME=PATH`, or from a `PATH` without `=`, which `name_of` names.

    `malformed` and `twice` are complaints about what has no name or no path, and about a name that is taken, with
    `{each}` and `{name}` to be filled in.
    """
    found: dict[str, Path] = {}
    for each in named:
        name, path = each.split("=", 1) if "=" in each else (name_of(Path(each)), each)
        if not name or not path:
            raise UserError(malformed.format(each=each))
        if name in found:
            raise UserError(twice.format(each=each, name=name))
        found[name] = Path(path)
    return found
