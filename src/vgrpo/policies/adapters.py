"""LoRA on a diffusers network: putting it on, counting what it reached, writing it as diffusers reads it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from vgrpo.errors import UserError

if TYPE_CHECKING:
    from vgrpo.config import Adapter

log = logging.getLogger(__name__)
POLICY = "policy"
"""Name of the trained adapter."""


def add_lora(net: torch.nn.Module, settings: Adapter, targets: tuple[str, ...], seed: int) -> int:
    """Adds the trained adapter in float32, its first weights drawn from `seed`, and returns how many modules it reached.

    Raises:
        UserError: no module matches the targets. One target of several that matches nothing is a warning.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

    wanted = settings.targets or targets
    names = [name for name, module in net.named_modules() if isinstance(module, torch.nn.Linear)]
    idle = [t for t in wanted if not any(name == t or name.endswith("." + t) for name in names)]
    if len(idle) == len(wanted):
        tails = sorted({name.split(".", 2)[-1] for name in names})
        raise UserError(f"adapter.targets: none of {list(wanted)} is a linear layer of this network; there are {tails}")
    if idle:
        log.warning("adapter.targets: %s match no module of this network", ", ".join(idle))
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=list(wanted), init_lora_weights="gaussian"
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        cast(Any, net).add_adapter(config, adapter_name=POLICY)
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return sum(isinstance(module, LoraLayer) for module in net.modules())


def load_lora(pipe: Any, network: str, settings: Adapter) -> None:
    """Gives the trained adapter the weights of `settings.start`.

    Raises:
        UserError: no such file, another rank or alpha, or weights for other modules than those adapted here.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    start, net = str(settings.start), getattr(pipe, network)
    if not Path(start).exists():
        raise UserError(f"adapter.start: there is no file or folder {start}")
    try:
        found, *_, metadata = type(pipe).lora_state_dict(start, return_lora_metadata=True, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"adapter.start: {start} holds no LoRA of diffusers' format: {error}") from error
    prefix = f"{network}."
    weights = {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}
    facts = {k.removeprefix(prefix): v for k, v in (metadata or {}).items()}
    for key, mine in (("r", settings.rank), ("lora_alpha", settings.alpha)):
        if key in facts and facts[key] != mine:
            name = {"r": "rank", "lora_alpha": "alpha"}[key]
            raise UserError(
                f"adapter.{name}={mine:g}, but {start} has {facts[key]:g}; set adapter.{name}={facts[key]:g}"
            )
    expected = get_peft_model_state_dict(net, adapter_name=POLICY)
    odd = sorted(set(expected) ^ set(weights)) or sorted(k for k in expected if expected[k].shape != weights[k].shape)
    if odd:
        raise UserError(
            f"adapter.start: {start} is for other modules or another rank: {len(weights)} tensors, {len(expected)} expected, "
            f"e.g. {odd[:3]}"
        )
    set_peft_model_state_dict(net, weights, adapter_name=POLICY)


def save_lora(pipe: Any, network: str, folder: Path) -> None:
    """Writes `pytorch_lora_weights.safetensors` for `pipe.load_lora_weights`, with rank and alpha in its metadata.

    Without the metadata alpha would be lost and the adapter applied with the wrong strength.
    """
    from peft import get_peft_model_state_dict

    net = getattr(pipe, network)
    folder.mkdir(parents=True, exist_ok=True)
    type(pipe).save_lora_weights(
        folder,
        **{
            f"{network}_lora_layers": get_peft_model_state_dict(net, adapter_name=POLICY),
            f"{network}_lora_adapter_metadata": net.peft_config[POLICY].to_dict(),
        },
    )
