"""Seven questions that the site answers: each has a path of pages, and an answer on the last."""

from itertools import pairwise

import pytest

from tests.support.pages import DOCS, blocks, links

HOME, CHOOSE = "index.md", "choose.md"
QUESTIONS = {
    "five hospitals that share patients": (
        [HOME, CHOOSE, "methods/uldp.md"],
        ["UldpAvg(", "add or remove one person everywhere"],
    ),
    "ten thousand phones, and a server that nobody trusts": (
        [HOME, CHOOSE, "methods/dp2-fedsam.md"],
        ["population=10_000", "SecureSum(", "against the server", 'personal=("head",)'],
    ),
    "twenty factories with a budget of 4": (
        [HOME, CHOOSE, "methods/dp-ditto.md"],
        ["RecordLevelPlan.for_target(", "budget=Budget(epsilon=4.0", "one record of one client"],
    ),
    "a FedAdam project that must halve its messages": (
        [HOME, CHOOSE, "methods/upcycled.md"],
        ["Upcycled(FedAdam(", "[2, 4, 6, 8]", "guarantee is that of the wrapped"],
    ),
    "a pretrained backbone on two hundred clinics": (
        [HOME, CHOOSE, "own-model.md"],
        ['trainable=("classifier",)', "population=200", "What ε = 2 means here"],
    ),
    "how to resume": (
        [HOME, "guides/resume.md"],
        [
            "--resume RUN",
            'recorded(FederatedStrategy(DPFedAvg(), plan, evaluate_every=0), "hospital-a")',
        ],
    ),
    "how to deploy": (
        [HOME, "deploy.md"],
        ["make deploy", "flower-superlink", "flower-supernode", "partition-id=0", "state-folder="],
    ),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_path_of_links_leads_from_home_to_a_page_that_answers(question):
    path, answer = QUESTIONS[question]
    for before, after in pairwise(path):
        page = DOCS / before
        reached = {(page.parent / target).resolve() for target, _ in links(page) if target}
        assert (DOCS / after).resolve() in reached, f"{before} does not link {after}"
    text = (DOCS / path[-1]).read_text(encoding="utf-8")
    assert [words for words in answer if words not in text] == []


@pytest.mark.parametrize("question", [name for name in QUESTIONS if name != "how to deploy"])
def test_the_answer_is_a_program_that_the_tests_run(question):
    path, answer = QUESTIONS[question]
    page = DOCS / path[-1]
    code = "".join(b.code for b in blocks(page) if b.kind == "python" and not b.skipped)
    assert any(words in code for words in answer)


@pytest.mark.parametrize("question", list(QUESTIONS)[:5])
def test_the_page_of_choices_names_situations_and_what_epsilon_means_there(question):
    path, _ = QUESTIONS[question]
    text = (DOCS / CHOOSE).read_text(encoding="utf-8").partition("## Five situations")[2]
    situation = next(part for part in text.split("\n### ") if f"]({path[-1]}" in part)
    assert "ε" in situation
