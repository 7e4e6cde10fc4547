"""The proof: every layout against plain PyTorch. ``python3 -m mmm_lab.parity``"""
