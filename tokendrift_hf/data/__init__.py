from .packing import DiffusionCollator, load_text, pack_documents

__all__ = ["DiffusionCollator", "load_text", "pack_documents"]
