"""`miles-submit logs -f` on a run that goes on to another attempt."""

from types import SimpleNamespace

from miles_hpc.launchers import logs


def test_what_a_rank_said_at_its_end_is_printed_before_the_log_of_the_next_attempt(fresh_run, monkeypatch, capsys):
    """Both were written between two looks."""
    paths, looks = fresh_run.paths, []
    paths.attempt(1).mkdir(parents=True)

    def look():
        looks.append(1)
        if len(looks) == 2:
            with paths.log(1, "train", 0).open("a") as log:
                log.write("its end\n")
            paths.attempt(2).mkdir()
            paths.log(2, "train", 0).write_text("the next\n")
        return SimpleNamespace(ended=len(looks) == 3)

    paths.log(1, "train", 0).write_text("begin\n")
    monkeypatch.setattr(logs, "Follower", lambda folder: SimpleNamespace(look=look))
    monkeypatch.setattr(logs.time, "sleep", lambda seconds: None)
    assert logs.show(fresh_run.folder, None, None, None, follow=True) == 0
    assert capsys.readouterr().out == "begin\nits end\nthe next\n"
