"""Cases of losses: every reduction, with and without weights, smoothing and ignored targets; classes divided too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from matrix import Case, Column
from matrix_shapes import IMAGE, make


def losses() -> Iterator[Case]:
    x, flat, grid = (4, 6, 5, 7), (7, 6), torch.arange(4 * 5 * 7).view(4, 5, 7) % 6
    ids, weight = torch.tensor([0, 3, 5, 2, 2, 1, 4]), torch.linspace(0.5, 2, 6)
    scalar = {f"d{d}": Column(dim=d, results=2) for d in range(4)}
    two = {k: scalar[k] for k in ("d0", "d1")}
    probs, soft = torch.rand(flat, generator=torch.Generator().manual_seed(1)), torch.linspace(-1, 1, 42).view(flat).softmax(1)

    def add(
        row: str, name: str, f: Callable[..., Any], tensors: dict[str, torch.Tensor], shape: tuple[int, ...] = flat
    ) -> Case:
        names = ("batch", "filter") if len(shape) == 2 else IMAGE
        return make(row, name, f, shape, names, "loss", tensors, **(two if len(shape) == 2 else scalar))

    for reduction in ("mean", "sum", "none"):

        def ce(m: Any, x: torch.Tensor, r: str = reduction, **more: Any) -> torch.Tensor:
            return F.cross_entropy(x, m.ids, reduction=r, **more)

        yield add("cross-entropy", f"cross-entropy {reduction}", ce, {"ids": ids})
        yield add(
            "cross-entropy", f"cross-entropy {reduction} ignore 2", lambda m, x, ce=ce: ce(m, x, ignore_index=2), {"ids": ids}
        )
        yield add("cross-entropy", f"cross-entropy {reduction} ignore -100", ce, {"ids": ids.where(ids != 3, -100)})
        yield add(
            "cross-entropy",
            f"cross-entropy {reduction} weighted ignore 255",
            lambda m, x, ce=ce: ce(m, x, weight=m.w.detach(), ignore_index=255),
            {"ids": ids.where(ids != 3, 255), "w": weight},
        )
        yield add(
            "cross-entropy",
            f"cross-entropy {reduction} smoothed",
            lambda m, x, ce=ce: ce(m, x, label_smoothing=0.1, ignore_index=1),
            {"ids": ids},
        )
        yield add(
            "cross-entropy",
            f"cross-entropy {reduction} weighted",
            lambda m, x, ce=ce: ce(m, x, weight=m.w.detach(), ignore_index=1),
            {"ids": ids, "w": weight},
        )
        yield add(
            "cross-entropy",
            f"cross-entropy {reduction} weighted smoothed",
            lambda m, x, ce=ce: ce(m, x, weight=m.w.detach(), label_smoothing=0.2),
            {"ids": ids.where(ids != 3, -100), "w": weight},
        )
        yield add(
            "cross-entropy",
            f"cross-entropy {reduction} soft",
            lambda m, x, r=reduction: F.cross_entropy(x, m.p.detach(), reduction=r),
            {"p": soft},
        )
        yield add(
            "cross-entropy",
            f"cross-entropy {reduction} soft weighted smoothed",
            lambda m, x, r=reduction: F.cross_entropy(x, m.p.detach(), m.w.detach(), reduction=r, label_smoothing=0.1),
            {"p": soft, "w": weight},
        )
        yield add("cross-entropy", f"cross-entropy {reduction} spatial", ce, {"ids": grid}, x)
        yield add(
            "cross-entropy",
            f"cross-entropy {reduction} spatial ignore",
            lambda m, x, ce=ce: ce(m, x, ignore_index=0),
            {"ids": grid},
            x,
        )
        yield add(
            "NLL",
            f"NLL {reduction}",
            lambda m, x, r=reduction: F.nll_loss(x.log_softmax(1), m.ids, reduction=r, ignore_index=4),
            {"ids": ids},
        )
        yield add(
            "NLL",
            f"NLL {reduction} weighted spatial",
            lambda m, x, r=reduction: F.nll_loss(x.log_softmax(1), m.ids, m.w.detach(), reduction=r),
            {"ids": grid, "w": weight},
            x,
        )
        for name, f in (
            ("MSE", lambda m, x, r=reduction: F.mse_loss(x, m.p, reduction=r)),
            ("L1", lambda m, x, r=reduction: F.l1_loss(x, m.p, reduction=r)),
            ("smooth L1", lambda m, x, r=reduction: F.smooth_l1_loss(x, m.p, reduction=r, beta=0.5)),
            ("Huber", lambda m, x, r=reduction: F.huber_loss(x, m.p, reduction=r, delta=0.7)),
            ("BCE", lambda m, x, r=reduction: F.binary_cross_entropy(x.sigmoid(), m.p.detach(), reduction=r)),
            ("BCE with logits", lambda m, x, r=reduction: F.binary_cross_entropy_with_logits(x, m.p.detach(), reduction=r)),
            ("KL", lambda m, x, r=reduction: F.kl_div(x.log_softmax(1), m.p.detach(), reduction=r)),
            (
                "KL log target",
                lambda m, x, r=reduction: F.kl_div(x.log_softmax(1), m.p.detach().log_softmax(1), reduction=r, log_target=True),
            ),
            ("soft margin", lambda m, x, r=reduction: F.soft_margin_loss(x, m.p.detach().sign(), reduction=r)),
            ("Poisson NLL", lambda m, x, r=reduction: F.poisson_nll_loss(x, m.p.detach(), reduction=r)),
        ):
            yield add(name.replace(" log target", ""), f"{name} {reduction}", f, {"p": probs})
        yield add(
            "BCE with logits",
            f"BCE with logits {reduction} pos_weight",
            lambda m, x, r=reduction: F.binary_cross_entropy_with_logits(x, m.p.detach(), pos_weight=m.w.detach(), reduction=r),
            {"p": probs, "w": weight},
        )
        yield add(
            "BCE with logits",
            f"BCE with logits {reduction} weight",
            lambda m, x, r=reduction: F.binary_cross_entropy_with_logits(x, m.p.detach(), m.w.detach(), reduction=r),
            {"p": probs, "w": weight},
        )
    yield add("KL", "KL batchmean", lambda m, x: F.kl_div(x.log_softmax(1), m.p.detach(), reduction="batchmean"), {"p": soft})


CASES = tuple(losses())
