"""dp-accounting: this accountant with its interface, and conversion of its events."""

from jaxdp_episodic.accountant.interop.dp_accounting import (
    EpisodicAccountant as EpisodicAccountant,
    to_dp_event as to_dp_event,
)
from jaxdp_episodic.accountant.interop.dp_event import from_dp_event as from_dp_event
