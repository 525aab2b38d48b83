"""Steps of a run as the contour's kernels take them: the nodes of their losses."""

from __future__ import annotations

from jaxdp_episodic.accounting.exact.mgf import Steps
from jaxdp_episodic.accounting.run import Group
from jaxdp_episodic.losses.loss_nodes import NodeRule
from jaxdp_episodic.numerics.loops import Array, at, map_arrays, namespace

# Imaginary part of the checking nodes' path, relative to the other's, and by how many
# nats they are cut later. Much lower, the terms of rare large losses would fall off too
# slowly on the contour, and the check would be the less accurate of the two.
_CHECK_HEIGHT, _CHECK_CUT = 0.9, -8.0
# None is cut nearer than where the density is e^-18 of its peak.
_LEAST_CUT = -18.0


def steps_of(
    group: Group, backward: Array, log_cut: Array, *, num_nodes: int, num_terms: int
) -> Steps:
    """The nodes of one group's losses, and others that check them.

    Args:
      group: (K, n) steps.
      backward: (n,) 1 or 0.
      log_cut: (n,) logarithm of the density at which the distributions are cut.
      num_nodes: of each.
      num_terms: of those that are mixtures, else 1.
    """
    xp = namespace(group.count, backward, log_cut)
    shape = group.count.shape

    def flat(a: Array) -> Array:
        return xp.broadcast_to(a, shape).reshape(-1)

    loss, back, cut = map_arrays(flat, (group.loss, backward, log_cut))
    # The cut is relative to the mass of the steps that see the unit.
    cut = cut - xp.log(loss.outer_rate)
    # The nodes and those that check them.
    cuts = xp.minimum(xp.stack([cut, cut + _CHECK_CUT]), _LEAST_CUT)
    heights = xp.stack([xp.ones_like(cut), xp.full_like(cut, _CHECK_HEIGHT)])
    both = loss.nodes(NodeRule(back, cuts, heights, num_nodes, num_terms))
    sign = 1 - 2 * backward
    nodes = at(both, 0)
    atoms = None
    if group.loss.may_have_atoms:
        # Nodes of a smooth density on the real line stand for no atoms.
        atoms = ((nodes.right <= 0) | (nodes.left <= 0)) & (nodes.spacing <= 0)
        atoms = atoms & (loss.gaussian_shift() <= 0)
    return Steps(
        nodes,
        at(both, 1),
        group.count,
        group.loss.outer_rate,
        sign * group.loss.spike(),
        group.loss.gaussian_shift(),
        group.loss.spread(),
        atoms,
    )
