"""The small models that the demos of rollcorr start from: weights and tokenizers, no code.

demo     a Qwen3 policy over bytes with 1.0 M parameters, which solves two of five sums; tools/make_demo_checkpoint.py
shapes   an SD3-type transformer that draws colored shapes, 0.3 M parameters; tools/make_shapes_model.py

They are a distribution of their own, rollcorr-demo-models, because they are five times as large as rollcorr itself.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
