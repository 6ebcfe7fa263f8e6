"""`--mesh "ep=2,etp=2"`: parallel degrees from a short list of some of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moec.diagnostics import did_you_mean, fail

AXES = ("dp", "tp", "edp", "ep", "etp", "pp")
_CLUSTER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}(\[[1-9][0-9]{0,5}\])?")


@dataclass(frozen=True)
class Degrees:
    """dp * tp == edp * ep * etp, in each of pp stages."""

    dp: int = 1
    tp: int = 1
    edp: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1


def parse_mesh(text: str | None) -> Degrees:
    """Degrees of an option like `dp=2,tp=2`; None is one rank. Raises E0730.

    With attention's axes alone, ep = dp * tp. With the experts' alone, dp = edp * ep and tp = etp.
    """
    given: dict[str, int] = {}
    for item in (text or "").split(",") if text else []:
        key, _, value = (word.strip() for word in item.partition("="))
        if key not in AXES or key in given:
            if key in given:
                raise fail("E0730", f"--mesh: `{key}` is given twice", "give each axis once")
            raise fail("E0730", f"--mesh: `{key}` is no axis", did_you_mean(key, AXES) or f"axes: {', '.join(AXES)}")
        if not re.fullmatch(r"[1-9][0-9]{0,5}", value):
            raise fail(
                "E0730", f"--mesh: `{key}` is `{value}`, not a whole number from 1 to 999999", "for example --mesh ep=2"
            )
        given[key] = int(value)
    has_attention, has_experts = bool(given.keys() & {"dp", "tp"}), bool(given.keys() & {"edp", "ep", "etp"})
    mesh = Degrees(**given)
    if has_attention and not has_experts:
        return Degrees(mesh.dp, mesh.tp, ep=mesh.dp * mesh.tp, pp=mesh.pp)
    if not has_attention:
        return Degrees(mesh.edp * mesh.ep, mesh.etp, mesh.edp, mesh.ep, mesh.etp, mesh.pp)
    if (left := mesh.dp * mesh.tp) != (right := mesh.edp * mesh.ep * mesh.etp):
        raise fail("E0730", f"--mesh: dp * tp is {left}, but edp * ep * etp is {right}", "both count the same ranks")
    return mesh


def parse_cluster(text: str | None) -> str | None:
    """A cluster option, `NAME` or `NAME[NODES]`, unchanged. Raises E0730."""
    if text is not None and not _CLUSTER.fullmatch(text):
        raise fail("E0730", f"--cluster: `{text}` is not NAME or NAME[NODES]", "for example --cluster dgx_h100[4]")
    return text
