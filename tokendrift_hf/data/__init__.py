from .collators import DiffusionCollator
from .packing import pack_documents
from .text import load_text

__all__ = ["DiffusionCollator", "load_text", "pack_documents"]
