import math
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from recipes.data import ByteText
from recipes.data.text import NO_TARGET
from recipes.gpt import GPT, Block, rotate
from recipes.language_model import LanguageModel, TextSamples, TextWriter, printable
from tests.recipes.samples import distance, ragged_sequences
from tests.support import make_trainer

ADAMW = partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
TINY = {"context": 16, "width": 16, "heads": 2, "layers": 2}


def model(optimizer=ADAMW, **options):
    torch.manual_seed(0)
    return built(LanguageModel(optimizer, **TINY | options))


def built(module):
    module.configure_model()
    return module


def test_attention_is_the_formula():
    torch.manual_seed(0)
    attention = Block(12, 3, 0.0).attention
    hidden = torch.randn(2, 5, 12)
    query, key, value = attention.qkv(hidden).chunk(3, dim=-1)
    heads = []
    for part in range(3):
        q, k, v = (each[..., 4 * part : 4 * part + 4] for each in (query, key, value))
        scores = (q @ k.transpose(1, 2) / 2.0).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v)
    assert torch.allclose(attention(hidden), attention.out(torch.cat(heads, -1)), atol=1e-6)


def test_weights_begin_as_in_gpt2_and_may_be_tied():
    torch.manual_seed(0)
    net = GPT(256, 32, width=64, heads=4, layers=8).requires_grad_(False)
    assert net.token.weight.std() == pytest.approx(0.02, rel=0.05)
    assert net.blocks[3].attention.qkv.weight.std() == pytest.approx(0.02, rel=0.05)
    assert net.blocks[3].attention.out.weight.std() == pytest.approx(0.02 / 4, rel=0.05)
    assert net.blocks[3].mlp[2].weight.std() == pytest.approx(0.02 / 4, rel=0.05)
    assert all((p == 0).all() for name, p in net.named_parameters() if name.endswith("bias"))
    assert (net.norm.weight == 1).all()
    assert net.head.weight is not net.token.weight
    tied = GPT(256, 32, width=64, heads=4, layers=8, tie_weights=True)
    assert "head.weight" not in tied.state_dict()
    tied.blocks, tied.position, tied.norm = nn.ModuleList(), None, nn.Identity()
    assert torch.equal(tied(torch.arange(3).unsqueeze(0)), tied.token.weight[None, :3] @ tied.token.weight.T)
    with pytest.raises(ValueError, match=r"width is 64 and heads is 5.*multiple"):
        GPT(256, 32, width=64, heads=5, layers=1)


def test_only_matrices_decay():
    module = model(tie_weights=True)
    decayed, exempt = module.configure_optimizers().param_groups
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in module.net.named_parameters()}
    assert all(p.ndim == 2 for p in decayed["params"])
    assert all(names[id(p)].endswith(("bias", "norm.weight")) for p in exempt["params"])
    assert len(decayed["params"]) + len(exempt["params"]) == len(names)


def test_bits_per_character_are_all_bits_over_all_characters(tmp_path):
    module = model(vocabulary=None)  # of the tokenizer: bytes
    text = "Öl für 5 €, 日本\n".encode()
    rows = [(text[:9], text[1:10]), (text[10:13], text[11:14]), (text[14:-1], text[15:])]
    tokens, targets = torch.zeros(3, 16, dtype=torch.int64), torch.full((3, 16), NO_TARGET)
    for row, (given, wanted) in enumerate(rows):
        tokens[row, : len(given)], targets[row, : len(wanted)] = torch.tensor(list(given)), torch.tensor(list(wanted))
    nats = F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten(), reduction="sum").item()
    wanted = b"".join(wanted for _, wanted in rows)
    characters = sum(byte & 0xC0 != 0x80 for byte in wanted)
    assert characters < len(wanted) - 4

    data = DataLoader(TensorDataset(tokens, targets), batch_size=2)  # of unequal weight
    (metrics,) = make_trainer(tmp_path).validate(module, data, verbose=False)
    per_byte = nats / len(wanted)
    expected = {"bpc": nats / characters / math.log(2), "loss": per_byte, "perplexity": math.exp(per_byte)}
    assert metrics == {f"val_{name}": pytest.approx(value, rel=1e-5) for name, value in expected.items()}
    module.log = lambda *_, **__: None
    assert module.training_step((tokens, targets), 0)["weight"] == len(wanted)  # of its share in a window
    module = model(vocabulary=300, tokenizer="not needed to validate")
    (metrics,) = make_trainer(tmp_path).validate(module, data, verbose=False)
    assert set(metrics) == {"val_loss", "val_perplexity"}  # without byte tokens, bits per character are unknown


def test_generated_text_depends_on_its_seed_only():
    module = model(sample_length=30).eval()
    state = torch.get_rng_state()
    first = module.write("The ")
    assert module.write("The ", seed=0) == first
    assert module.write("The ", seed=1) != first
    assert torch.equal(torch.get_rng_state(), state)
    module.temperature = 0.0
    assert module.write("The ", seed=0) == module.write("The ", seed=1)


def test_generation_continues_beyond_the_context_and_ends_with_the_document():
    module = model(sample_length=40, temperature=0.0, context=4).eval()
    follows = {0: ord("a"), **{byte: byte + 1 for byte in range(ord("a"), ord("z"))}, ord("z"): 0}

    class Alphabet(nn.Module):
        context = 4

        def forward(self, tokens):
            assert tokens.shape[1] <= 4
            return F.one_hot(torch.tensor([[follows.get(t, 0) for t in tokens[0].tolist()]]), 256).float()

    module.net = Alphabet()
    assert (module.write(""), module.write("w")) == ("abcdefghijklmnopqrstuvwxyz", "xyz")
    module.sample_length = 2
    assert module.write("w") == "xy"


def test_predict_writes_a_file(tmp_path, capsys):
    module = model(sample_length=10)
    data = ByteText(prompts=["Das Öl", "x"])
    trainer = make_trainer(tmp_path, callbacks=[TextWriter(str(tmp_path / "run"))])
    (first,), (second,) = trainer.predict(module, datamodule=data)
    assert first == "Das Öl" + module.eval().write("Das Öl", seed=0)
    assert second == "x" + module.write("x", seed=1)
    assert (tmp_path / "run" / "samples.txt").read_text("utf-8") == f"{first}\n\n{'-' * 80}\n{second}\n"
    assert capsys.readouterr().out.startswith(f"{printable(first)}\n")
    assert printable("a\tb\x1b[31m\nö") == "a?b?[31m\nö"  # no control characters for a terminal


def test_rotary_positions_depend_on_distance_only():
    torch.manual_seed(0)
    query, key = torch.randn(8), torch.randn(8)
    turned = rotate(torch.stack([query.expand(12, 8), key.expand(12, 8)]))
    products = turned[0] @ turned[1].T  # of a query and a key at each pair of places
    for distance_ in range(-5, 6):
        diagonal = products.diagonal(distance_)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-5)
    assert not torch.allclose(products[0, 0], products[0, 1], atol=1e-2)
    assert torch.equal(turned[0, 0], query)
    cos, sin = math.cos(3.0), math.sin(3.0)  # the first pair is turned by 1 for each place
    pair = torch.stack([query[0] * cos - query[4] * sin, query[0] * sin + query[4] * cos])
    assert torch.allclose(turned[0, 3, [0, 4]], pair, atol=1e-5)
    net = GPT(256, 16, width=32, heads=4, layers=1, positions="rotary").eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(10.0)
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert not torch.allclose(net(tokens)[0, -1], net(tokens[:, [1, 0, 2, 3]])[0, -1], atol=1e-4)  # order counts
    with pytest.raises(ValueError, match=r"a head is 3 wide.*even"):
        GPT(256, 16, width=12, heads=4, layers=1, positions="rotary")
    with pytest.raises(ValueError, match=r"positions is 'absolute', expected 'learned' or 'rotary'"):
        GPT(256, 16, width=12, heads=4, layers=1, positions="absolute")


def test_weights_depend_on_the_seed_only():
    first = model().state_dict()
    torch.rand(5)
    again = built(LanguageModel(ADAMW, **TINY))  # the seed is that of manual_seed, independent of earlier draws
    assert all(torch.equal(value, first[f"net.{name}"]) for name, value in again.net.state_dict().items())
    torch.manual_seed(1)
    assert not torch.equal(built(LanguageModel(ADAMW, **TINY)).net.token.weight, first["net.token.weight"])
    assert not torch.equal(first["net.token.weight"][:16], first["net.position.weight"])

    module = LanguageModel(ADAMW, **TINY)
    with torch.device("meta"):
        module.configure_model()
    assert all(p.is_meta for p in module.parameters())
    torch.manual_seed(0)
    module.to_empty(device="cpu")
    module.init_weights()
    assert all(torch.equal(value, first[f"net.{name}"]) for name, value in module.net.state_dict().items())


def test_texts_of_each_validation_and_a_checkpoint(tmp_path):
    module = model(sample_length=5)
    data = DataLoader(ragged_sequences(), batch_size=4)
    trainer = make_trainer(tmp_path, max_epochs=2, callbacks=[TextSamples(str(tmp_path / "run"), prompt="The ")])
    trainer.fit(module, data, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = LanguageModel.load_from_checkpoint(tmp_path / "last.ckpt", optimizer=ADAMW, weights_only=True)
    assert distance(loaded, module) == 0.0
    written = (tmp_path / "run" / "written.txt").read_text(encoding="utf-8")
    assert re.findall(r"after (\d+) steps:\nThe ", written) == ["2", "4"]  # and none of the sanity check
    assert written.endswith(f"The {module.eval().write('The ')}\n")
