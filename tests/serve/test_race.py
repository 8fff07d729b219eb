"""The race page, in a real browser and against a real server."""

import pytest

from tests.serve.browser import browser
from tests.serve.servers import save_pair, server

SIZES = """[...document.querySelectorAll("section, canvas, pre, button")].map(element => {
  const {width, height} = element.getBoundingClientRect();
  return {name: element.tagName, width, height, cut: element.scrollWidth > element.clientWidth};
})"""
INK = """(id => {
  const canvas = document.getElementById(id), {width, height} = canvas;
  const data = canvas.getContext("2d").getImageData(0, 0, width, height).data, colors = new Set();
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) colors.add(data.slice(i, i + 3).join());
  return colors.size;
})"""


@pytest.mark.slow
def test_two_models_race_in_a_browser(tmp_path):
    """Both finish, figures and charts are drawn, nothing is cut, in light and dark, wide and narrow windows."""
    rnn, transformer = save_pair(tmp_path)
    options = [f"--model={rnn}", f"--transformer={transformer}", "--slots=2"]
    with server(*options) as running, browser(tmp_path) as page:
        for width, dark, query in ((1100, False, ""), (420, True, "&turns")):
            page.open(f"{running.url}/?start&length=600&temperature=0&prompt=The{query}", width, dark=dark)
            page.wait(f"location.search.endsWith('=The{query}') && document.body?.dataset.finished === 'true'")
            assert page.errors == []
            sizes = page.value(SIZES)
            assert len(sizes) == 7 and not any(size["cut"] for size in sizes)
            assert all(size["width"] > 60 and size["height"] > 30 for size in sizes)
            assert page.value("document.documentElement.scrollWidth <= innerWidth")
            figures = page.value(
                "lanes.map(own => [...own.section.querySelectorAll('dd')].map(d => +d.textContent.replaceAll(',', '')))"
            )
            tokens, speed, seconds, state = zip(*figures)
            # So many tokens that even a slow browser does not get all at once: then they would have no speed.
            assert tokens == (600, 600) and all(x > 0 for x in (*speed, *seconds)) and min(state) >= 0
            assert page.value("lanes.map(own => own.model.kind)") == ["RNN", "transformer"]
            assert page.value("lanes.every(own => own.text.textContent.length > 0)")
            assert all(page.value(f"{INK}('{name}')") > 2 for name in ("progress", "memory"))
        page.value("document.getElementById('length').max = ''; document.getElementById('length').value = 999999")
        page.value("document.getElementById('start').click()")
        page.wait("document.getElementById('problem').textContent.includes('max_tokens=999,999')")
