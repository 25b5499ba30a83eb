"""`torchtitan import` of Axolotl's table `qat`."""

import pytest
import yaml

from torchtitan.config.options import ConfigError
from torchtitan.plugins.importers import parse, split
from torchtitan.plugins.importers.command import translate

FILE = {
    "base_model": "llama",
    "datasets": [{"path": "a.jsonl", "type": "alpaca"}],
    "learning_rate": 1e-4,
    "max_steps": 9,
}


def imported(tmp_path, **qat):
    path = tmp_path / "qat.yml"
    path.write_text(yaml.safe_dump(FILE | {"qat": qat}))
    text, config, _ = translate(parse(split([str(path)])), "axolotl")
    return config.qat, text


INT4 = dict(weight_dtype="int4")
TRANSLATED = [
    (INT4 | dict(activation_dtype="int8", group_size=32), ("int4", "int8", 32, False, 0), "integers around 0"),
    (INT4, ("int4", "none", 32, False, 0), "int4 of weights rounded to fp8"),
    (INT4 | dict(activation_dtype="float8", group_size=None), ("int4", "fp8", 128, False, 0), "not rounded"),
    (INT4 | dict(quantize_embedding=True, fake_quant_after_n_steps=5), ("int4", "none", 32, True, 5), "torchao"),
    (dict(weight_dtype="fp8", activation_dtype="float8_e4m3fn"), ("fp8", "fp8", None, False, 0), "not rounded"),
    (
        dict(weight_dtype="nvfp4", activation_dtype="nvfp4", group_size=16, fake_quant_after_n_steps=5),
        ("nvfp4", "nvfp4", None, False, 0),
        "no effect in Axolotl",
    ),
    (dict(weight_dtype="mxfp4"), ("mxfp4", "mxfp4", None, False, 0), "not rounded"),
]


@pytest.mark.parametrize("table, options, note", TRANSLATED, ids=lambda value: str(value)[:60])
def test_translated(tmp_path, table, options, note):
    qat, text = imported(tmp_path, **table)
    assert (qat.weight_dtype, qat.activation_dtype, qat.group_size, qat.quantize_embedding, qat.after_steps) == options
    assert note in text


REFUSED = [
    ({}, "qat.weight_dtype: given int8; allowed: one of int4, fp8, nvfp4, mxfp4"),
    ({"group_size": 32}, "qat.weight_dtype: given int8; allowed: one of int4, fp8, nvfp4, mxfp4"),
    (INT4 | dict(activation_dtype="int4"), "qat.activation_dtype: given int4; allowed: unset or int8 or fp8 with "),
    (INT4 | dict(activation_dtype="int2"), "qat.activation_dtype: given int2; allowed: one of int4, int8, nvfp4, "),
    (INT4 | dict(weight_typ="int4"), "qat.weight_typ: given int4; allowed: one of activation_dtype, weight_dtype, "),
    (INT4 | dict(group_size="32"), "qat.group_size: given 32; allowed: a whole number, at least 2"),
    (dict(weight_dtype="nvfp4", activation_dtype="nvfp4"), "qat.group_size: given 32; allowed: 16"),
    (
        INT4 | dict(fake_quant_after_n_steps=0),
        "qat.fake_quant_after_n_steps: given 0; allowed: a whole number, at least 1",
    ),
    (INT4 | dict(quantize_embedding="yes"), "qat.quantize_embedding: given yes; allowed: true or false"),
]


@pytest.mark.parametrize("table, message", REFUSED, ids=lambda value: str(value)[:60])
def test_refused(tmp_path, table, message):
    with pytest.raises(ConfigError) as error:
        imported(tmp_path, **table)
    (line,) = [str(fault) for fault in error.value.faults]
    assert message in line.replace('"', "")
