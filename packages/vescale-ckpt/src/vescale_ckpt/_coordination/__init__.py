"""How the ranks of a save or a load talk: small messages over the group's store, never collectives on tensors.

So a background thread can do it beside training, a rank that fails reaches the others, and one that dies is named.
"""

from .factory import coordinator
from .interface import Coordinator, Members
from .single import Alone
from .store import StoreMembers

__all__ = ["Alone", "Coordinator", "Members", "StoreMembers", "coordinator"]
