"""The coefficient of the entropy bonus that keeps the policy's entropy from falling below a target. Plain numbers; no torch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBonus:
    """Coefficient of the entropy bonus, and whether the next step has it."""

    coef: float
    """Coefficient, which moves by ``delta`` a step."""
    low: bool = True
    """True if the entropy was at its target or below in the last step; before the first one, too."""

    @property
    def applied(self) -> float:
        """Coefficient of the next step: 0 while the entropy is above its target."""
        return self.coef if self.low else 0.0

    def after(self, entropy: float, *, target: float, delta: float, most: float) -> "EntropyBonus":
        """Return the bonus after a step with this mean entropy per token, in nats as ``target``; the same for one that is not finite.

        The coefficient grows by ``delta``, up to ``most``, while the entropy is at most ``target``, and falls by ``delta`` to 0 at the
        least while it is above. Source: He et al. 2025 (Skywork-OR1, 2505.22312), "adaptive entropy control".
        """
        if not math.isfinite(entropy):
            return self
        low = entropy <= target
        return EntropyBonus(coef=min(self.coef + delta, most) if low else max(self.coef - delta, 0.0), low=low)
