"""FPO (arXiv 2507.21053) and the plain ELBO surrogate: V-GRPO's ratio without its three techniques.

The likelihood is the pretraining loss as it is, the mean square of the network's own target; every picture has its own
pairs of time and noise, times are drawn independently. What V-GRPO adds is read best as the difference to this file.

Differences from FPO's paper: it trains policies of robots, with an advantage from a value function; here advantages are
relative to the group, as in all objectives.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vgrpo.objectives.vgrpo import VGRPO


class FPO(VGRPO):
    """V-GRPO with FPO's defaults; every setting of `VGRPO` can be turned on again."""

    name: Literal["fpo"] = "fpo"  # type: ignore[assignment]
    times: Literal["stratified", "uniform", "logit_normal"] = "uniform"
    share: Literal["group", "batch", "none"] = "none"
    weighting: Literal["adaptive", "none", "x0", "eps"] = "none"
    clip: Annotated[float, Field(gt=0, lt=1)] | None = 0.05


class ELBO(FPO):
    """The same without a clip."""

    name: Literal["elbo"] = "elbo"  # type: ignore[assignment]
    clip: Annotated[float, Field(gt=0, lt=1)] | None = None
