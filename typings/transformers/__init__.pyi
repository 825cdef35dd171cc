# Working out the types of the real package takes pyright a third of its time.
from typing import Any

def __getattr__(name: str) -> Any: ...
