"""Files that several processes write at once, or that a killed process left."""

import multiprocessing

from flower_ext.runs.files import write_whole


def _write(path, content, times, begin, errors):
    begin.wait(timeout=60)
    try:
        for _ in range(times):
            write_whole(path, content, sync=False)
    except OSError as error:
        errors.put(str(error))


def test_writers_of_one_file_leave_the_content_of_one_of_them_and_no_draft(tmp_path):
    processes = multiprocessing.get_context("fork")
    begin, errors = processes.Barrier(3), processes.Queue()
    path, contents = tmp_path / "file", [bytes([65 + n]) * 50_000 for n in range(3)]
    writers = [
        processes.Process(target=_write, args=(path, content, 200, begin, errors))
        for content in contents
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert errors.empty()
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]
