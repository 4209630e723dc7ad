from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from trainer.loggers import adapter


def file_of(folder):
    (file,) = folder.rglob("metrics.csv")
    return file


def lines(folder):
    return file_of(folder).read_text().splitlines()


def first_run(folder):
    logger = CSVLogger(folder)
    for step in range(4):
        logger.log_metrics({"loss": step / 3}, step)
    logger.log_metrics({"val": 0.25, "epoch": 0}, 3)
    logger.save()
    logger.finalize("success")


def second_run(folder, step, count=None):
    logger = CSVLogger(folder)
    adapter(logger).use_version(0)
    adapter(logger).resume(step, count)
    return logger


def test_rows_that_will_be_written_again_are_dropped(tmp_path):
    first_run(tmp_path)
    logger = second_run(tmp_path, 2)
    kept = ["epoch,loss,step,val", ",0.0,0,", f",{1 / 3},1,"]
    assert lines(tmp_path) == kept
    logger.log_metrics({"loss": 7.0}, 2)
    logger.save()
    assert lines(tmp_path) == [*kept, ",7.0,2,"]
    logger.log_metrics({"new": 8.0}, 3)
    logger.save()
    assert lines(tmp_path) == ["epoch,loss,new,step,val", ",0.0,,0,", f",{1 / 3},,1,", ",7.0,,2,", ",,8.0,3,"]


def test_rows_are_counted_without_reading_if_possible(tmp_path):
    first_run(tmp_path)
    before = lines(tmp_path)
    logger = second_run(tmp_path, 2, count=4)
    assert lines(tmp_path) == before[:5]
    assert adapter(logger).position() == 4
    logger.log_metrics({"val": 0.25, "epoch": 0}, 3)
    logger.save()
    assert adapter(logger).position() == 5
    assert lines(tmp_path) == before


def test_rows_of_others_are_not_counted(tmp_path):
    assert adapter(TensorBoardLogger(tmp_path)).position() is None
    logger = CSVLogger(tmp_path)
    assert adapter(logger).position() is None
    _ = logger.experiment
    assert adapter(logger).position() == 0


def test_half_a_line_is_dropped(tmp_path):
    first_run(tmp_path)
    before = lines(tmp_path)
    with file_of(tmp_path).open("a") as file:
        file.write("0,0.12")
    second_run(tmp_path, None)
    assert lines(tmp_path) == before


def test_missing_and_empty_files_are_accepted(tmp_path):
    for content in (None, "", "epoch,lo"):
        if content is not None:
            file_of(tmp_path).write_text(content)
        logger = second_run(tmp_path, 3)
        logger.log_metrics({"loss": 1.0}, 3)
        logger.save()
        assert lines(tmp_path) == ["loss,step", "1.0,3"]


def test_newest_version_with_matching_files(tmp_path):
    folder = tmp_path / "lightning_logs"
    (folder / "version_x").mkdir(parents=True)
    for name in ("version_0/checkpoints/a.ckpt", "version_10/checkpoints/b.ckpt", "version_11/metrics.csv"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    csv, board = CSVLogger(tmp_path), TensorBoardLogger(tmp_path)
    assert (adapter(csv).newest_version("checkpoints/*.ckpt"), adapter(csv).newest_version()) == (10, 11)
    assert adapter(board).newest_version() is None
    assert adapter(CSVLogger(tmp_path / "none")).newest_version() is None
    assert adapter(csv).is_numbered
    assert not adapter(CSVLogger(tmp_path, version="mine")).is_numbered
