"""Numbers of messages: one each, and readable."""

from vescale_pipe._runtime.tags import Tags


def test_every_message_has_its_own() -> None:
    edges, count, tied = [(0, 1), (0, 2), (1, 2)], 5, [2, 3]
    tags = Tags(edges, count, tied, base=7)
    found = [tags.loss(), tags.added()]
    for edge in edges:
        for m in range(count):
            found += [tags.value(edge, m), tags.grad(edge, m)]
    for group, members in enumerate(tied):
        for member in range(members):
            found += [tags.tied(group, member, m) for m in range(count)]
            found.append(tags.tied_sum(group, member))
    assert len(set(found)) == len(found)
    assert min(found) >= 7
    assert max(found) < tags.end


def test_labels_name_both_ends() -> None:
    tags = Tags([(0, 1), (0, 2)], 4, [2], base=3)
    assert tags.label(tags.value((0, 2), 3)) == "the values of stage 0 for stage 2, micro-batch 3"
    assert tags.label(tags.grad((0, 2), 0)) == "the gradients of stage 2 for stage 0, micro-batch 0"
    assert tags.label(tags.loss()) == "the loss of the step"
    assert tags.label(tags.added()) == "the added losses of the step"
    assert tags.label(tags.tied(0, 1, 2)) == "the gradient of a tied parameter for micro-batch 2"
    assert tags.label(tags.tied_sum(0, 0)) == "the gradient of a tied parameter"
    assert tags.label(0) == "message 0"
