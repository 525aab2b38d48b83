"""dp-accounting: this accountant with its interface, and conversion of its events."""

from jaxdp_episodic.accountant.interop.dp_accounting import (
    EpisodicAccountant,
    to_dp_event,
)
from jaxdp_episodic.accountant.interop.dp_event import from_dp_event

__all__ = ["EpisodicAccountant", "from_dp_event", "to_dp_event"]
