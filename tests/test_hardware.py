# SPDX-License-Identifier: Apache-2.0
"""Chips and pods, held against published figures."""

import dataclasses

import pytest

from ipu_finetune.errors import UsageError
from ipu_finetune.hardware import CHIPS, PODS, pod, pods_by_size

pytestmark = pytest.mark.pure


def test_peaks_of_16_ipus_are_the_published_5_6_and_4_0_petaflops():
    assert round(pod("bow-pod16").fp16_petaflops, 1) == 5.6
    assert round(pod("pod16").fp16_petaflops, 1) == 4.0


def test_16_ipus_hold_14_4_gb():
    assert pod("pod16").memory_gb == pytest.approx(14.4)
    assert pod("bow-pod16").memory_gb == pytest.approx(14.4)


@pytest.mark.parametrize(
    ("name", "fp16", "fp32"),
    [("pod64", 15.978, 3.994), ("bow-pod256", 89.23, 22.31)],  # the two datasheets, PFLOPS
)
def test_peaks_agree_with_the_datasheets(name, fp16, fp32):
    assert pod(name).fp16_petaflops == pytest.approx(fp16, rel=1e-3)
    assert pod(name).ipus * pod(name).chip.fp32_teraflops / 1e3 == pytest.approx(fp32, rel=1e-3)


@pytest.mark.parametrize(("chip", "exchange"), [("GC200", 7.8), ("Bow", 10.9)])
def test_exchange_and_memory_of_a_chip_follow_from_its_tiles(chip, exchange):
    assert round(CHIPS[chip].exchange_terabytes_per_second, 1) == exchange
    assert CHIPS[chip].sram_mib == 897


@pytest.mark.parametrize("chip", CHIPS.values(), ids=str)
def test_every_figure_of_a_chip_has_a_source(chip):
    figures = {each.name for each in dataclasses.fields(chip)} - {"name", "sources"}
    assert set(chip.sources) == figures
    assert all(len(source) > 20 for source in chip.sources.values())


def test_pods_of_both_chips_have_the_five_sizes():
    assert {name: place.ipus for name, place in PODS.items() if place.chip.name == "GC200"} == {
        "pod4": 4,
        "pod16": 16,
        "pod64": 64,
        "pod128": 128,
        "pod256": 256,
    }
    assert [place.name for place in pods_by_size(CHIPS["Bow"])] == [
        "bow-pod4",
        "bow-pod16",
        "bow-pod64",
        "bow-pod128",
        "bow-pod256",
    ]


@pytest.mark.parametrize(("written", "name"), [("IPU-POD16", "pod16"), ("Bow-POD64", "bow-pod64"), (" pod4 ", "pod4")])
def test_the_vendors_spelling_of_a_pod_serves(written, name):
    assert pod(written) is PODS[name]


def test_an_unknown_pod_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match="unknown pod 'pod15'.*did you mean 'pod16'"):
        pod("pod15")
