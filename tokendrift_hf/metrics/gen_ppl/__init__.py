try:
    from tokendrift_hf.metrics.gen_ppl.gen_ppl import GenPPL
except ModuleNotFoundError as error:  # of evaluate, or of what it needs
    raise ImportError(f'Gen.-PPL needs {error.name}: pip install "tokendrift-hf[eval]".') from error

__all__ = ["GenPPL"]
