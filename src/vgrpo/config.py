"""Every setting of a run, checked before any weight is opened.

A recipe is a YAML file with these sections; `key.path=value` overrides it. All mistakes are reported at once, each with
the nearest valid key. What can be derived is a property and cannot be set.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from vgrpo.errors import UserError
from vgrpo.lookup import find_object, nearest
from vgrpo.objectives import OBJECTIVES
from vgrpo.objectives.vgrpo import VGRPO
from vgrpo.rewards import REWARDS
from vgrpo.rewards import load as load_reward

Positive = Annotated[int, Field(ge=1)]
Sampler = Literal["pipeline", "dpmpp", "unipc", "euler", "heun", "ddim"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Model(Section):
    path: str
    """Hub name or local folder of a diffusers pipeline; `asset:tiny-sd3` is the embedded model."""
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the frozen network; adapters and loss maths are float32."""
    height: Positive = 512
    width: Positive = 512
    """Size of the pictures in pixels."""
    max_sequence_length: Positive = 256
    """Text tokens of the T5 encoder; the pictures depend on it, so it is the same in rollout, training and export."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


class Adapter(Section):
    kind: Literal["lora", "full"] = "lora"
    """`lora` trains low-rank adapters, `full` every weight of the network."""
    rank: Positive = 32
    alpha: Annotated[float, Field(gt=0)] = 64
    targets: tuple[str, ...] | None = None
    """Module names that get an adapter; the family's attention layers when absent."""
    start: str | None = None
    """Folder or file of a LoRA in diffusers' format to begin with, of the same rank, alpha and targets. A KL to the
    start is then one to this adapter, not to the base model."""


class Prompts(Section):
    train: str
    """File or folder of prompts: txt, jsonl, csv, GenEval metadata, a flow_grpo folder; `asset:...` for ours."""
    test: str | None = None
    """Held-out prompts for evaluation."""
    per_step: Positive = 32
    """Prompts per step over all processes: the P of the method."""
    tags: tuple[str, ...] | None = None
    """Train only on prompts whose `meta.tag` is one of these."""


class Rollout(Section):
    group_size: Annotated[int, Field(ge=2)] = 16
    """Images per prompt: the G of the method. Group-relative advantages need at least 2."""
    steps: Positive = 16
    """Steps K of the ODE sampler."""
    sampler: Sampler = "pipeline"
    """ODE solver of the rollout and the evaluation; `pipeline` is the one the model came with. `euler` and `heun` are for
    flow matching, `ddim` for DDPM models."""
    shift: Annotated[float, Field(gt=0)] | None = None
    """Timestep shift of the flow schedule; the model's own when absent."""
    guidance: Annotated[float, Field(ge=0)] = 1.0
    """Classifier-free guidance; 1 means none, as the method trains. More doubles the calls of a rollout."""
    micro_batch: Positive = 64
    """Images in one sampling or decoding call."""


class Advantages(Section):
    scale: Literal["group", "batch", "none"] = "group"
    """Divide by the spread of the group, of the whole step, or not at all."""
    combine: Literal["sum", "normalised"] = "sum"
    """Weighted sum of raw rewards, or each reward normalised in its group before the weighted mean."""
    soft_clip: Annotated[float, Field(gt=0)] | None = None
    """η of Â = η·tanh(A/η), Eq. 17; the control for one update per rollout."""
    hard_clip: Annotated[float, Field(gt=0)] | None = 5.0
    offset: Annotated[float, Field(ge=0)] = 0.0
    """Added at last to every advantage that is not 0: a pull towards all of the policy's own pictures, which keeps it
    consistent with them while the worse ones push. Ours, not in the paper."""


class Update(Section):
    per_rollout: Positive = 1
    """Optimizer steps in one pass over a rollout; its groups are split evenly among them."""
    passes: Positive = 1
    """How often each image is used."""
    micro_batch: Positive = 64
    """Images in one training call."""
    joint_draws: bool = False
    """Hold the graph of all M draws at once, which saves the ratio's own forward passes; else one draw at a time."""
    ratio_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest |ratio − 1| before the first update of a rollout; 1e-4 in float32 and 5e-2 below when absent."""

    @property
    def total(self) -> int:
        """Optimizer steps per rollout."""
        return self.per_rollout * self.passes


class Optimizer(Section):
    lr: Annotated[float, Field(gt=0)] = 3e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls to zero over the run."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Updates over which the rate rises linearly."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0


class RewardEntry(BaseModel):
    """One reward: `weight`, `kind` (its own name when absent) and that kind's settings."""

    model_config = ConfigDict(frozen=True, extra="allow")
    kind: str = ""
    weight: float = 1.0

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class Evaluation(Section):
    every: Positive = 20
    """Steps between evaluations; the first and the last step are always evaluated."""
    points: Positive | None = None
    """Evaluations spread over `run.budget`, in place of `every`."""
    prompts: Positive = 200
    """How many held-out prompts, spread evenly over the file."""
    images_per_prompt: Positive = 1
    steps: Positive | None = None
    """Sampler steps of an evaluation; the rollout's when absent."""
    sampler: Sampler | None = None
    """Its ODE solver; the rollout's when absent."""
    rewards: dict[str, RewardEntry] | None = None
    """Rewards to report; those of training when absent."""
    main: str | None = None
    """The reward in the headline; the first one when absent."""
    pictures: Annotated[int, Field(ge=0)] = 24
    """How many pictures to keep for the before/after grid."""
    seed: int = 10_000


class Budget(Section):
    """One of the three; a run ends after the step that spends it, and its rate falls over it."""

    calls: Positive | None = None
    """Network calls of training: a picture through the network once, guidance counted double."""
    seconds: Annotated[float, Field(gt=0)] | None = None
    """Seconds of training, evaluations and saving apart."""
    updates: Positive | None = None
    """Optimizer steps."""

    @model_validator(mode="after")
    def one_of_three(self) -> Budget:
        given = {k: v for k, v in self.model_dump().items() if v is not None}
        if len(given) != 1:
            raise ValueError(f"run.budget: expected one of calls, seconds and updates, got {given or 'none'}")
        return self

    @property
    def unit(self) -> str:
        return next(k for k, v in self.model_dump().items() if v is not None)


class Run(Section):
    name: str = "run"
    folder: str = "runs"
    steps: Positive = 100
    budget: Budget | None = None
    """What ends the run before `steps` do."""
    seed: int = 0
    save_every: Positive = 20
    keep: Positive = 2
    """Checkpoints kept; older ones go after a new one is complete."""
    sample_every: Positive = 20
    """Steps between saved grids of training samples."""
    ema: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay of the averaged weights; when set, they are evaluated and exported, and training goes on from the raw ones."""
    trackers: tuple[str, ...] = ()
    """Extra views of the metrics through accelerate: tensorboard, trackio, wandb, ..."""
    threads: Positive | None = None
    """CPU threads of this process."""


def build_objective(settings: Any) -> Any:
    """The objective that `settings` name, V-GRPO where they name none.

    Raises:
        UserError: no such objective or wrong settings, one a line.
    """
    if not isinstance(settings, Mapping):
        return settings
    kind = load_objective(settings.get("name", "vgrpo"))
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        lines = [describe(e, list(kind.model_fields), prefix=("objective",)) for e in error.errors()]
        raise UserError("\n".join(lines)) from None


def load_objective(name: Any) -> Any:
    """The class of an objective: a name of ours, or `module:Class`, `file.py:Class`."""
    if name in OBJECTIVES:
        return find_object(OBJECTIVES[name])
    if isinstance(name, str) and ":" in name:
        return find_object(name)
    raise UserError(
        f"objective.name: no objective {name!r}{nearest(str(name), OBJECTIVES)}; there are {', '.join(OBJECTIVES)}, "
        f"or your own as file.py:Class"
    )


class Config(Section):
    """A whole run. `load_recipe` makes one from a file."""

    model: Model
    adapter: Adapter = Adapter()
    prompts: Prompts
    rollout: Rollout = Rollout()
    rewards: dict[str, RewardEntry] = {}
    """By name. When empty, `train` must be given functions."""
    advantages: Advantages = Advantages()
    objective: Annotated[Any, BeforeValidator(build_objective)] = VGRPO()
    """Settings of one of `vgrpo.objectives`, chosen by its `name`."""
    update: Update = Update()
    optimizer: Optimizer = Optimizer()
    evaluation: Evaluation = Evaluation()
    run: Run = Run()

    @property
    def images_per_step(self) -> int:
        return self.prompts.per_step * self.rollout.group_size

    @property
    def updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.run.steps * self.update.total

    @model_validator(mode="after")
    def groups_fill_updates(self) -> Config:
        if self.prompts.per_step % self.update.per_rollout:
            raise ValueError(
                f"update.per_rollout={self.update.per_rollout} must divide prompts.per_step={self.prompts.per_step}, "
                f"for an update is made of whole groups"
            )
        if self.evaluation.main and self.evaluation.main not in (self.evaluation.rewards or self.rewards):
            raise ValueError(f"evaluation.main={self.evaluation.main!r} is none of the evaluated rewards")
        return self

    @model_validator(mode="after")
    def points_need_a_budget(self) -> Config:
        if self.evaluation.points and not self.run.budget:
            raise ValueError("evaluation.points spreads evaluations over run.budget, which is not set")
        return self

    @model_validator(mode="after")
    def objective_can_run(self) -> Config:
        problems = self.objective.problems(
            steps=self.rollout.steps, updates=self.update.total, group_size=self.rollout.group_size
        )
        if "average" in self.objective.anchors(updates=self.update.total) and self.run.ema is None:
            problems.append(
                f"objective {self.objective.name} has a KL to the moving average: set run.ema, for example to 0.9"
            )
        if problems:
            raise ValueError("\n  ".join(problems))
        return self

    def inactive(self) -> list[str]:
        """Settings that are on but cannot act, in words."""
        return self.objective.inactive(updates=self.update.total)

    def dump(self) -> dict[str, Any]:
        """Plain values that `Config` accepts again."""
        return self.model_dump(mode="json")


def build_rewards(entries: Mapping[str, RewardEntry]) -> dict[str, Any]:
    """The reward objects of `entries`. Raises UserError for an unknown kind or a wrong setting."""
    problems, built = [], {}
    for name, entry in entries.items():
        try:
            kind = load_reward(entry.kind or name)
            built[name] = kind(**entry.settings) if isinstance(kind, type) else kind
        except ValidationError as error:
            valid = list(getattr(kind, "model_fields", {}))
            problems += [describe(e, valid, prefix=("rewards", name)) for e in error.errors()]
        except (UserError, TypeError) as error:
            problems.append(f"rewards.{name}: {error}")
        else:
            if not isinstance(kind, type) and entry.settings:
                problems.append(f"rewards.{name}: a function takes no settings, got {', '.join(entry.settings)}")
    if problems:
        raise UserError("\n".join(problems))
    return built


def recipes() -> list[str]:
    """Names of the recipes in the package."""
    folder = importlib.resources.files("vgrpo") / "recipes"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def load_recipe(name_or_path: str | Path, **overrides: Any) -> Config:
    """The settings of a recipe by name or of a YAML file, with `overrides` by dotted key on top.

    Example: `load_recipe("tiny", **{"run.steps": 5, "objective.draws": 2})`

    Raises:
        UserError: no such recipe or file, no YAML, or any mistake in the settings, all of them in one message.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise UserError(f"no recipe file {path}; give a file that exists, or one of: {', '.join(recipes())}")
        text = path.read_text(encoding="utf-8-sig")
    elif str(name_or_path) in recipes():
        text = (importlib.resources.files("vgrpo") / "recipes" / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    else:
        raise UserError(
            f"no recipe {name_or_path!r}{nearest(str(name_or_path), recipes())}; there are: {', '.join(recipes())}"
        )
    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{name_or_path} is not YAML: {error}") from error
    if not isinstance(settings, dict):
        raise UserError(
            f"{name_or_path} must hold sections such as model: and prompts:, it holds {type(settings).__name__}"
        )
    for key, value in overrides.items():
        put(settings, key, value)
    return parse(settings)


def parse(settings: Mapping[str, Any]) -> Config:
    """A Config, or a UserError with all mistakes, one a line."""
    problems: list[str] = []
    config = None
    try:
        settings = {**settings, "objective": build_objective(settings.get("objective", {}))}
    except UserError as error:
        problems += str(error).splitlines()
        settings = {k: v for k, v in settings.items() if k != "objective"}
    try:
        config = Config.model_validate(settings)
    except ValidationError as error:
        problems += [describe(e, valid_keys(e["loc"])) for e in error.errors()]
    rewards = config.rewards if config else reward_entries(settings.get("rewards"))
    evaluated = (config.evaluation.rewards or {}) if config else {}
    for entries in (rewards, evaluated):
        try:
            build_rewards(entries)
        except UserError as error:
            problems += str(error).splitlines()
    if problems or config is None:
        head = "the settings have a mistake" if len(problems) == 1 else f"the settings have {len(problems)} mistakes"
        raise UserError(f"{head}:\n" + "\n".join(f"  {p}" for p in problems))
    return config


def reward_entries(value: Any) -> dict[str, RewardEntry]:
    """The well-formed entries of a `rewards` section that belongs to settings with other mistakes."""
    good = {}
    for name, entry in (value if isinstance(value, dict) else {}).items():
        try:
            good[str(name)] = RewardEntry.model_validate(entry)
        except ValidationError:
            continue  # reported with the section itself
    return good


def put(settings: dict[str, Any], key: str, value: Any) -> None:
    """Sets `a.b.c` to `value`, making sections on the way."""
    *parents, last = key.split(".")
    for parent in parents:
        child = settings.setdefault(parent, {})
        if not isinstance(child, dict):
            raise UserError(f"{key}: {parent} is a value, not a section, so nothing can be set inside it")
        settings = child
    settings[last] = value


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """`["run.steps=5", "adapter.kind=full"]` as a dict; values are read as YAML. Raises UserError for other forms."""
    out = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key or key.startswith("-"):
            raise UserError(f"expected key.path=value, got {argument!r}")
        try:
            out[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"{key}: {value!r} is not a YAML value: {error}") from error
    return out


def valid_keys(location: tuple[int | str, ...]) -> list[str]:
    """The keys of the section in which the last part of `location` was looked for."""
    if location[:1] == ("objective",):
        return list(VGRPO.model_fields)
    section: Any = Config
    for part in location[:-1]:
        field = getattr(section, "model_fields", {}).get(part)
        if field is None:
            return []
        section = next((a for a in (field.annotation, *get_args(field.annotation)) if hasattr(a, "model_fields")), None)
    return list(getattr(section, "model_fields", {}))


def everywhere(key: str) -> list[str]:
    """Dotted names of all settings that are called `key`."""
    sections = {name: valid_keys((name, "")) for name in Config.model_fields}
    return [f"{section}.{key}" for section, keys in sections.items() if key in keys]


ALIASES = {
    "num_generations": "group_size",
    "n": "draws",
    "learning_rate": "lr",
    "beta": "kl_weight",
    "clip_range": "clip",
}


def describe(error: Any, valid: list[str], prefix: tuple[str, ...] = ()) -> str:
    """One line for one pydantic error: where, what was expected, what came."""
    location = (*prefix, *error["loc"])
    where = ".".join(str(part) for part in location)
    if error["type"] == "extra_forbidden":
        key = str(location[-1])
        elsewhere = [name for name in everywhere(key) if name != where] or everywhere(ALIASES.get(key, ""))
        hint = f", did you mean {elsewhere[0]!r}?" if elsewhere else nearest(key.replace("-", "_"), valid)
        return f"{where}: no such setting{hint}"
    if error["type"] == "missing":
        return f"{where}: missing"
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}: {message}, got {error['input']!r}" if location and error["type"] != "value_error" else message


__all__ = ["OBJECTIVES", "REWARDS", "Config", "build_rewards", "load_recipe", "parse", "parse_overrides", "recipes"]
