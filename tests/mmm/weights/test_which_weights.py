"""Which tensors a folder of Hugging Face's means where its files contradict each other: as transformers takes it."""

import torch

from mmm.generate import config_of
from mmm.models.llama.model import Transformer
from mmm.weights.open_weights import open_weights
from support.llamas import CONFIG, logits, tensors, write_hugging_face, write_safetensors

TOKENS = torch.arange(40).view(2, 20) * 7 % 67
TIED = {**CONFIG, "tie_word_embeddings": True}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def computed(path):
    """Logits of the model that a folder has, in float64."""
    weights = open_weights(path)
    model = Transformer(config_of(weights)).double()
    full = {name: weights.read(name, (0,) * len(entry.shape), entry.shape) for name, entry in weights.entries.items()}
    model.load_state_dict({"output.weight": full["tok_embeddings.weight"], **full})
    with torch.no_grad():
        return model(TOKENS)


def assert_computes(path, weights):
    torch.testing.assert_close(computed(path), logits(CONFIG, weights, TOKENS), rtol=1e-11, atol=1e-11)


def test_tied_by_the_config_but_not_by_the_file(tmp_path):
    weights = tensors(CONFIG)
    assert_computes(write_hugging_face(tmp_path / "hf", TIED, weights), weights)
    read = open_weights(tmp_path / "hf")
    assert not read.sizes["tie_word_embeddings"]
    assert read.metadata.notes == (f"tie_word_embeddings is true, but {HEAD} is not {EMBEDDING}: the two are not tied",)


def test_tied_and_there_twice(tmp_path):
    weights = tensors(TIED)
    twice = write_hugging_face(tmp_path / "twice", TIED, {**weights, HEAD: weights[EMBEDDING].clone()})
    only_head = {HEAD if name == EMBEDDING else name: tensor for name, tensor in weights.items()}
    for path in (twice, write_hugging_face(tmp_path / "head", TIED, only_head, files=2)):
        assert_computes(path, weights)
        assert open_weights(path).sizes["tie_word_embeddings"]
        assert open_weights(path).metadata.notes == ()


def test_one_file_is_taken_before_an_index(tmp_path):
    new, old = tensors(CONFIG, seed=1), tensors(CONFIG)
    write_hugging_face(tmp_path / "hf", CONFIG, old, files=2)
    write_safetensors(tmp_path / "hf" / "model.safetensors", new)
    assert_computes(tmp_path / "hf", new)
    assert open_weights(tmp_path / "hf").metadata.notes[0].startswith("model.safetensors.index.json is passed over")


def test_other_files_beside_the_one(tmp_path):
    """As consolidated.safetensors, of Meta's names, which some folders have too."""
    write_hugging_face(tmp_path / "hf")
    write_safetensors(tmp_path / "hf" / "consolidated.safetensors", {"tok_embeddings.weight": torch.ones(2)})
    assert_computes(tmp_path / "hf", tensors(CONFIG))
