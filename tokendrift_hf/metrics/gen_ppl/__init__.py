from tokendrift_hf.metrics.gen_ppl.gen_ppl import GenPPL

__all__ = ["GenPPL"]
