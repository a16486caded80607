"""A diffusers pipeline as a policy: loading, prompts, sampling by the stock call, one network call for training."""

from __future__ import annotations

import importlib
import importlib.resources
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vgrpo.errors import RunError, UserError
from vgrpo.policies import POLICIES
from vgrpo.policies.adapters import add_lora, load_lora, save_lora
from vgrpo.seeds import seed_of
from vgrpo.types import Cond, Prompt

if TYPE_CHECKING:
    from vgrpo.config import Config

FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
SAMPLERS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "linear": {
        "euler": ("FlowMatchEulerDiscreteScheduler", {}),
        "heun": ("FlowMatchHeunDiscreteScheduler", {}),
        "dpmpp": ("DPMSolverMultistepScheduler", FLOW),
        "unipc": ("UniPCMultistepScheduler", FLOW),
    },
    "vp": {
        "ddim": ("DDIMScheduler", {}),
        "dpmpp": ("DPMSolverMultistepScheduler", {}),
        "unipc": ("UniPCMultistepScheduler", {}),
    },
}
"""ODE solvers of diffusers by path. For flows those that integrate exactly or to second order; DEIS and SASolver do not and
are left out. On the variance-preserving path Euler and Heun scale their input and are left out."""


PATHS = {"linear": "linear path (flow matching)", "vp": "variance-preserving path (DDPM)"}


class Pipeline:
    """A text-to-image pipeline of a known family, with one trainable network.

    Everything that a family does differently is asked of `family`; see `policies/sd3.py` for one.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        folder, class_name = find(config.model.path, config.model.revision)
        self.config, self.device = config, device
        self.family = family_of(class_name, config.model.path)
        self.pipe = open_pipeline(config, folder).to(device)
        self.pipe.set_progress_bar_config(disable=True)
        own, self.steps = self.pipe.scheduler, config.rollout.steps
        self.pipe.scheduler = make_scheduler(own, config.rollout.sampler, config.rollout.shift, self.family)
        for_evaluation = config.evaluation.sampler or config.rollout.sampler
        self.for_evaluation = (
            make_scheduler(own, for_evaluation, config.rollout.shift, self.family),
            config.evaluation.steps or config.rollout.steps,
        )
        self.net: torch.nn.Module = getattr(self.pipe, self.family.network)
        for part in self.pipe.components.values():
            if isinstance(part, torch.nn.Module):
                part.requires_grad_(False).eval()  # eval throughout: dropout would make old and new scores disagree
        self.adapted = 0
        if config.adapter.kind == "lora":
            self.adapted = add_lora(
                self.net, config.adapter, self.family.lora_targets, seed_of(config.run.seed, "adapter")
            )
            if config.adapter.start:
                load_lora(self.pipe, self.family.network, config.adapter)
        else:
            self.net.float().requires_grad_(True)
        if config.model.gradient_checkpointing:
            self.net.enable_gradient_checkpointing()
        self.path = self.family.path(self.pipe)
        self.guidance_kind = self.family.guidance_kind(self.pipe)
        if self.guidance_kind == "none" and config.rollout.guidance > 1:
            raise UserError(
                f"rollout.guidance={config.rollout.guidance:g}: {config.model.path} was distilled without guidance; set it to 1"
            )
        self.dtype = torch.float32 if config.adapter.kind == "full" else getattr(torch, config.model.dtype)
        self.calls = 0
        """Pictures that went through the network so far, guidance counted double: the unit in which methods are compared."""
        self._encoded: dict[str, dict[str, Tensor]] = {}
        self.parts = {self.family.network: dict(self.net.config), "vae": dict(self.pipe.vae.config)}
        self.latent_shape = self.family.latent_shape(self.parts, config.model.height, config.model.width)

    @property
    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """The trained weights by name, in a fixed order."""
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad}

    def encode(self, prompts: Sequence[Prompt]) -> Cond:
        """[P, ...] conditioning in the order of `prompts`; a text that was seen before costs no encoder call."""
        new = list(dict.fromkeys(p.text for p in prompts if p.text not in self._encoded))
        with torch.no_grad():
            for texts in chunks(new, 64):
                cond = self.family.encode(self.pipe, texts, self.config.model.max_sequence_length)
                for i, text in enumerate(texts):
                    self._encoded[text] = {k: v[i].cpu() for k, v in cond.items()}
        rows = [self._encoded[p.text] for p in prompts]
        return {k: torch.stack([r[k] for r in rows]).to(self.device, self.dtype) for k in rows[0]}

    def schedule(self, steps: int | None = None) -> Tensor:
        """Times [K] in (0, 1], from noise to data, of the scheduler itself after the pipeline's own call to it."""
        steps = steps or self.steps
        scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
        arguments = self.family.schedule_arguments(self.pipe, scheduler, steps, self.latent_shape)
        if "sigmas" in arguments:
            scheduler.set_timesteps(device="cpu", **arguments)
        else:
            scheduler.set_timesteps(steps, device="cpu", **arguments)
        if self.family.path_kind == "vp":
            return torch.unique_consecutive((scheduler.timesteps.double() + 1) / len(self.path.alphas[1:])).float()
        sigmas = scheduler.sigmas[scheduler.sigmas > 0]
        return torch.unique_consecutive(sigmas).float()

    def noise(self, seeds: Iterable[int]) -> Tensor:
        """Initial noise [N, *latent], each row from its own seed exactly as the stock pipeline draws it."""
        return torch.cat(
            [torch.randn(1, *self.latent_shape, generator=torch.Generator().manual_seed(s)) for s in seeds]
        )

    def sample(self, noise: Tensor, cond: Cond) -> Tensor:
        """Finished latents [N, *latent] float32 by the stock pipeline call."""
        guidance = self.config.rollout.guidance
        negative = None
        if self.doubled:
            empty = self.encode([Prompt(text="", id="")])
            negative = {k: v.expand(len(noise), *v.shape[1:]) for k, v in empty.items()}
        out = self.pipe(
            **self.family.call(cond, negative),
            latents=self.family.pack(noise.to(self.device, self.dtype)),
            num_inference_steps=self.steps,
            guidance_scale=guidance,
            height=self.config.model.height,
            width=self.config.model.width,
            output_type="latent",
            return_dict=False,
        )[0]
        self.calls += len(noise) * len(self.pipe.scheduler.timesteps) * (2 if self.doubled else 1)
        return self.family.unpack(out.float(), self.latent_shape)

    @property
    def doubled(self) -> bool:
        """Whether guidance means two network calls."""
        return self.guidance_kind == "cfg" and self.config.rollout.guidance > 1

    @torch.no_grad()
    def decode(self, x0: Tensor) -> Tensor:
        """Pictures uint8 [N, 3, H, W], rounded as the stock pipeline rounds them.

        Raises:
            RunError: the decoder gave a number that is not finite, as half-precision decoders do when they overflow.
        """
        latents = self.family.unscale(self.pipe, x0.to(self.device)).to(self.pipe.vae.dtype)
        pixels = self.pipe.vae.decode(latents, return_dict=False)[0]
        if not pixels.isfinite().all():
            raise RunError(
                f"the VAE decoder ({self.pipe.vae.dtype}) gave pixels that are not finite; use model.dtype=float32"
            )
        return (pixels.float() / 2 + 0.5).clamp(0, 1).mul(255).round().byte().cpu()

    def finish(self, x: Tensor, cond: Cond, t: float, steps: int) -> Tensor:
        """Finished latents [N, *latent] from states `x` at `t` by DPM-Solver++ over `steps` equal steps of time."""
        import diffusers

        scheduler = diffusers.DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction")
        scheduler.set_timesteps(steps, device=self.device)
        # the solver has no argument for a start below 1, so its own table is written
        scheduler.sigmas = torch.linspace(t, 0, steps + 1)
        scheduler.timesteps = scheduler.sigmas[:-1].to(self.device) * 1000
        for timestep in scheduler.timesteps:
            prediction = self.guided(x, (timestep / 1000).expand(len(x)), cond)
            x = scheduler.step(prediction, timestep, x, return_dict=False)[0]
        return x.float()

    def predict(self, x_t: Tensor, t: Tensor, cond: Cond) -> Tensor:
        """The network's output [N, *latent] at `t` [N] in [0, 1], in the units of `path.target`."""
        self.calls += len(x_t)
        return self.family.predict(self.net, x_t.to(self.dtype), t.to(x_t.device), cond, self.config.rollout.guidance)

    def guided(self, x_t: Tensor, t: Tensor, cond: Cond) -> Tensor:
        """`predict` with the rollout's classifier-free guidance, which doubles the calls; the same call without one."""
        x_t, t = x_t.to(self.device), t.to(self.device)
        guidance = self.config.rollout.guidance
        if not self.doubled:
            return self.predict(x_t, t, cond)
        empty = self.encode([Prompt(text="", id="")])
        both = {k: torch.cat([empty[k].expand_as(v), v]) for k, v in cond.items()}
        without, with_prompt = self.predict(torch.cat([x_t, x_t]), torch.cat([t, t]), both).chunk(2)
        return without + guidance * (with_prompt - without)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, sampling is that of evaluations, where settings give them a sampler or steps of their own."""
        kept = self.pipe.scheduler, self.steps
        self.pipe.scheduler, self.steps = self.for_evaluation
        try:
            yield
        finally:
            self.pipe.scheduler, self.steps = kept

    @contextmanager
    def using(self, weights: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Inside, the trained weights have the values of `weights`; None changes nothing."""
        if weights is None:
            yield
            return
        kept = {name: p.detach().clone() for name, p in self.trainable.items()}
        self.load(weights)
        try:
            yield
        finally:
            self.load(kept)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copies `weights` into the trained weights by name. Raises UserError unless names and shapes are the same."""
        mine = self.trainable
        if set(mine) != set(weights):
            odd = sorted(set(mine) ^ set(weights))[:3]
            raise UserError(
                f"these weights belong to another adapter: {len(mine)} tensors expected, {len(weights)} came, e.g. {odd}"
            )
        for name, p in mine.items():
            if p.shape != weights[name].shape:
                raise UserError(
                    f"{name} has shape {tuple(weights[name].shape)}, expected {tuple(p.shape)}; is the rank another?"
                )
            p.copy_(weights[name])

    def export(self, folder: Path) -> None:
        """Writes what a plain diffusers pipeline loads: a LoRA file, or the whole pipeline after full fine-tuning."""
        if self.config.adapter.kind == "lora":
            save_lora(self.pipe, self.family.network, folder)
        else:
            self.pipe.save_pretrained(folder)
        with self.evaluating():
            (folder / "settings.json").write_text(json.dumps(self.inference_settings(), indent=2))

    def inference_settings(self) -> dict[str, Any]:
        """What reproduces the evaluation's pictures with the plain pipeline."""
        m, r = self.config.model, self.config.rollout
        call = {"num_inference_steps": self.steps, "guidance_scale": r.guidance, "height": m.height, "width": m.width}
        return {
            "base_model": m.path,
            "revision": m.revision,
            "dtype": m.dtype,
            "scheduler": type(self.pipe.scheduler).__name__,
            "scheduler_config": {k: v for k, v in self.pipe.scheduler.config.items() if not k.startswith("_")},
            "call": call | {"max_sequence_length": m.max_sequence_length},
            "sigmas": self.schedule().tolist(),
        }


def find(path: str, revision: str | None = None) -> tuple[str, str]:
    """Folder or hub name, and the pipeline's class name, from `model_index.json` alone. Opens no weights."""
    if path.startswith("asset:"):
        path = str(importlib.resources.files("vgrpo") / "assets" / path.removeprefix("asset:"))
    folder = Path(path)
    if folder.is_dir():
        index = folder / "model_index.json"
        if not index.is_file():
            raise UserError(
                f"model.path: {folder} is no diffusers pipeline: it has no model_index.json; give the pipeline's top folder"
            )
        parts = json.loads(index.read_text())
        missing = [k for k, v in parts.items() if isinstance(v, list) and v[0] and not (folder / k).is_dir()]
        if missing:
            raise UserError(
                f"model.path: {folder} is incomplete: {', '.join(missing)} missing; download the pipeline again"
            )
        return str(folder), parts["_class_name"]
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(
            f"model.path: there is no folder {path}; give a pipeline folder or a hub name such as "
            "stabilityai/stable-diffusion-3.5-medium"
        )
    from diffusers import DiffusionPipeline

    try:
        return path, DiffusionPipeline.load_config(path, revision=revision)["_class_name"]
    except OSError as error:
        raise UserError(
            f"model.path: {path} is no local folder and cannot be read from the hub:\n  {str(error).splitlines()[0]}"
        ) from None


def family_of(class_name: str, path: str) -> Any:
    """The family of a pipeline class, or a UserError that says what an adapter needs."""
    if class_name not in POLICIES:
        raise UserError(
            f"model.path: {path} is a {class_name}; known are {', '.join(POLICIES)}. A family needs an adapter like "
            f"vgrpo/policies/sd3.py (network, lora_targets, path_kind, path, latent_shape, size_step, encode, call, predict, "
            f"guidance_kind, unfit, pack, unpack, schedule_arguments, unscale), "
            f"entered in vgrpo.policies.POLICIES"
        )
    module, name = POLICIES[class_name].split(":")
    return getattr(importlib.import_module(module), name)()


def check(config: Config) -> None:
    """Finds mistakes about the model from its JSON files alone: folder, family, picture size. Raises UserError."""
    folder, class_name = find(config.model.path, config.model.revision)
    family = family_of(class_name, config.model.path)
    needed = config.objective.needs_path
    if needed and needed != family.path_kind:
        raise UserError(
            f"objective.name={config.objective.name} is for models of a {PATHS[needed]}, "
            f"{config.model.path} ({class_name}) has a {PATHS[family.path_kind]}"
        )
    if not Path(folder).is_dir():
        return  # a hub name: its parts are read when it is opened
    parts = {name: json.loads((Path(folder) / name / "config.json").read_text()) for name in (family.network, "vae")}
    step = family.size_step(parts)
    for side in ("height", "width"):
        size = getattr(config.model, side)
        if size % step:
            near = sorted({max(step, size // step * step), (size // step + 1) * step})
            raise UserError(
                f"model.{side}={size} is no multiple of {step}, as this model needs; nearest: {' or '.join(map(str, near))}"
            )


def open_pipeline(config: Config, folder: str) -> Any:
    """The pipeline with its weights; a local folder is opened without a look at any network."""
    import transformers
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    dtype = getattr(torch, config.model.dtype)
    try:
        return DiffusionPipeline.from_pretrained(
            folder, revision=config.model.revision, dtype=dtype, local_files_only=Path(folder).is_dir()
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"model.path: {folder} could not be loaded: {str(error).splitlines()[0]}") from error


def make_scheduler(own: Any, sampler: str, shift: float | None, family: Any) -> Any:
    """The pipeline's scheduler, or a solver of diffusers by name with the same schedule and shift.

    Raises:
        UserError: a solver that does not fit the path or the pipeline, or a shift where there is none.
    """
    import diffusers

    kind = family.path_kind
    if kind == "vp" and shift is not None:
        raise UserError(f"rollout.shift={shift:g}: only flow-matching models have a shift")
    if sampler == "pipeline":
        return own if shift is None else type(own).from_config(own.config, shift=shift)
    known = [name for name in SAMPLERS[kind] if name not in family.unfit(own)]
    if sampler not in known:
        raise UserError(
            f"rollout.sampler={sampler} is not for this model, of a {PATHS[kind]}; use pipeline, {', '.join(known)}"
        )
    name, flags = SAMPLERS[kind][sampler]
    if kind == "linear":
        value = shift if shift is not None else own.config.get("shift", own.config.get("flow_shift", 1.0))
        flags = flags | {"flow_shift" if "use_flow_sigmas" in flags else "shift": value}
    return getattr(diffusers, name).from_config(own.config, **flags)


def chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[i : i + size] for i in range(0, len(items), size))
