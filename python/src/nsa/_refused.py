"""Refused, what every layer of the package raises for a call that it does not do.

Twin: nsa_status of nsa.h, whose kinds it has. Not here: rules; each stands where it is held.
"""
from __future__ import annotations

from typing import Any


class Refused(ValueError):
    """A call that was not done, in the library's words or in words like them: what is wrong, where, and what is
    allowed. Nothing was touched.

    kind: a member of Error, of what the package holds itself that which is nearest; where: the field, or \"\".
    """

    def __init__(self, text: str, kind: Any, where: str = ""):
        super().__init__(text)
        self._kind, self.where = kind, where

    @property
    def kind(self) -> Any:
        from ._abi import Error
        return Error[self._kind] if isinstance(self._kind, str) else Error(self._kind)

    def __reduce__(self) -> Any:
        return Refused, (str(self), self._kind, self.where)


def refused(kind: str, where: str, text: str) -> Refused:
    """kind: the name of a member of Error."""
    return Refused(f"{where}: {text}", kind, where)
