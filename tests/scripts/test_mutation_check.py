from _mutations import faults

SOURCE = '''
LIMIT = 3


class Sum:
    def add(self, values: list, start: int = 0):
        """Doc."""
        total = start + 1
        if total > LIMIT:
            raise ValueError(f"{total - 1}")
        self.reset()
        values.append(torch.zeros(2, dtype=torch.float32))
        for value in values:
            total = total - value
        return total


def name():
    return "a" + "b"
'''


def test_faults_are_drawn_from_the_bodies_of_functions():
    found = [(one.kind, one.line, one.after.strip()) for one in faults.candidates(SOURCE, "sum.py")]
    assert sorted(found) == [
        ("missing call", 11, "pass"),
        ("missing call", 12, "pass"),
        ("off by one", 8, "total = start + 2"),
        ("off by one", 9, "if total >= LIMIT:"),
        ("off by one", 12, "values.append(torch.zeros(3, dtype=torch.float32))"),
        ("sign", 8, "total = start - 1"),
        ("sign", 14, "total = total + value"),
        ("wrong dtype", 12, "values.append(torch.zeros(2, dtype=torch.float16))"),
        ("wrong order", 11, "values.append(torch.zeros(2, dtype=torch.float32))\n        self.reset()"),
    ]
