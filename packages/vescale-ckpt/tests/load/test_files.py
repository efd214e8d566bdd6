"""Open files of a reader: none is lost, whoever opens them at the same time."""

from vescale_ckpt._load.reader import Files


class Source:
    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


class Slow:
    """A storage in which another thread opens, uses and gives back a file while the first one still opens it."""

    def __init__(self):
        self.made, self.meanwhile = [], None

    def open(self, path):
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile(path)
        self.made.append(Source())
        return self.made[-1]


def test_a_file_that_two_threads_open_at_once_is_closed_both_times():
    storage = Slow()
    files = Files(storage)

    def other(path):
        files.take(path)
        files.give(path)

    storage.meanwhile = other
    files.take("a")
    files.give("a")
    files.close()
    assert [source.closed for source in storage.made] == [1, 1]
