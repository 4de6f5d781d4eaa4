"""One tree of errors, drawn as it is."""

import inspect
import re

from headway import errors


def test_every_error_stands_in_the_tree_under_its_parents():
    kinds = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__name__ == name}
    drawn = dict(re.findall(r"^\s+[|`\- ]+(\w+)(?:\s+\((\w+)\))?", errors.__doc__, re.MULTILINE))
    assert set(drawn) == set(kinds)
    for name, builtin in drawn.items():
        assert issubclass(kinds[name], errors.HeadwayError) or name in ("HeadwayWarning", "Preempted")
        if builtin:
            assert builtin in {base.__name__ for base in kinds[name].__mro__}
    assert issubclass(errors.HeadwayWarning, UserWarning)
    assert issubclass(errors.Preempted, SystemExit)


def test_one_error_for_every_name_that_is_not_served():
    for kind, python in ((errors.ImportNotServed, ImportError), (errors.AttributeNotServed, AttributeError)):
        assert issubclass(kind, errors.NotServed)
        assert issubclass(kind, python)
    assert issubclass(errors.NotServed, errors.UnsupportedError)
