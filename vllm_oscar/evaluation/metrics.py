"""How far the predictions made over a compressed cache are from those over a BF16 cache. Torch only."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scores:
    """One number for each scored position, float32 (windows, positions) each.

    Attributes:
        kl: KL(reference || method) of the next token's distribution, in nats
        loss: minus the log-probability that the method gives the token that really follows
        reference_loss: the same of the reference
        agrees: 1 where both have the same most likely token, else 0
    """

    kl: torch.Tensor
    loss: torch.Tensor
    reference_loss: torch.Tensor
    agrees: torch.Tensor

    @classmethod
    def of(cls, reference: torch.Tensor, logits: torch.Tensor, following: torch.Tensor) -> "Scores":
        """Compare two models' logits.

        Args:
            reference, logits: (..., positions, vocabulary), any float dtype
            following: int64 (..., positions), the tokens that really follow
        """
        p, q = reference.float().log_softmax(-1), logits.float().log_softmax(-1)

        def loss(log_probability: torch.Tensor) -> torch.Tensor:
            return -log_probability.gather(-1, following[..., None])[..., 0]

        return cls(
            kl=(p.exp() * (p - q)).sum(-1),
            loss=loss(q),
            reference_loss=loss(p),
            agrees=(p.argmax(-1) == q.argmax(-1)).float(),
        )

    @classmethod
    def cat(cls, parts: list["Scores"]) -> "Scores":
        """Join along positions."""
        return cls(*(torch.cat([getattr(part, name) for part in parts], -1) for name in cls.__dataclass_fields__))

    @classmethod
    def stack(cls, windows: list["Scores"]) -> "Scores":
        """Windows of one length, each (positions,), as (windows, positions)."""
        return cls(*(torch.stack([getattr(one, name) for one in windows]) for name in cls.__dataclass_fields__))

    def split(self, counts: list[int]) -> list["Scores"]:
        """The inverse of joining along windows."""
        parts = zip(*(getattr(self, name).split(counts) for name in self.__dataclass_fields__), strict=True)
        return [Scores(*part) for part in parts]

    def summary(self) -> dict[str, float]:
        """Means over all positions; the error is the standard error over windows (0 where there is one window)."""
        windows = self.kl.mean(-1)
        error = float(windows.std() / len(windows) ** 0.5) if len(windows) > 1 else 0.0
        perplexity, reference = (float(loss.double().mean().exp()) for loss in (self.loss, self.reference_loss))
        return {
            "kl": float(windows.double().mean()),
            "kl_error": error,
            "kl_p99": float(self.kl.flatten().quantile(0.99)),
            "perplexity": perplexity,
            "perplexity_change": perplexity / reference - 1,
            "top1": float(self.agrees.mean()),
        }
