"""The engine's thread as asyncio code sees it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dcoco import SamplingParams
from dcoco.engine import Engine
from dcoco.errors import EngineError, ParameterError, QueueFullError, StoppedError
from dcoco.loop import Answers, EngineLoop
from tests.models import prompts, tiny_decoder

LONG = SamplingParams(max_tokens=60, ignore_eos=True)
PATIENCE = 60.0


@asynccontextmanager
async def looping(**sizes: Any) -> AsyncIterator[EngineLoop]:
    engine_loop = EngineLoop(Engine(tiny_decoder(), **sizes))
    engine_loop.start()
    async with asyncio.timeout(PATIENCE):
        yield engine_loop
        engine_loop.close()
        await engine_loop.join()
    assert engine_loop.engine.running == len(engine_loop.engine.waiting) == 0
    assert not engine_loop._tickets


async def texts(answers: Answers) -> dict[int, str]:
    """All text of each answer."""
    found: dict[int, str] = {}
    async for index, chunk in answers:
        found[index] = found.get(index, "") + chunk.text
    answers.close()
    return found


def expected(asked: list[list[int]], params: SamplingParams = LONG) -> list[str]:
    outputs = tiny_decoder().generate(asked, params, "plain")
    return [answer.text for output in outputs for answer in output.outputs]


def test_answers_come_with_their_index():
    asked, params = prompts(3), SamplingParams(max_tokens=20, temperature=0.8, seed=1, n=2)

    async def main() -> None:
        async with looping() as engine_loop:
            for whole in (False, True):
                found = await texts(await engine_loop.submit(asked, params, whole))
                assert [found[index] for index in range(6)] == expected(asked, params)

    asyncio.run(main())


def test_cancelled_answers_leave_the_others_as_they_were():
    asked = prompts(6)

    async def main() -> None:
        async with looping(max_num_seqs=4) as engine_loop:
            each = [await engine_loop.submit([ids], LONG) for ids in asked]
            leaving, staying = (
                each[:2] + each[5:],
                each[2:5],
            )  # the first rows, which others then take, and one that waits
            async for _ in leaving[0]:
                break
            for answers in leaving:
                answers.close()
            found = await asyncio.gather(*map(texts, staying))
            assert [text[0] for text in found] == expected(asked[2:5])

    asyncio.run(main())


def test_a_submission_that_is_given_up_is_cancelled():
    async def main() -> None:
        async with looping(max_num_seqs=1) as engine_loop:
            task = asyncio.ensure_future(engine_loop.submit(prompts(1), LONG))
            await asyncio.sleep(0)  # it has begun
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await texts(await engine_loop.submit(prompts(1), LONG)) == dict(enumerate(expected(prompts(1))))

    asyncio.run(main())


def test_all_or_none_of_a_submission():
    async def main() -> None:
        async with looping(max_num_seqs=1, max_waiting=1) as engine_loop:
            with pytest.raises(ParameterError, match="not an id"):
                await engine_loop.submit([*prompts(1), [99]], LONG)
            with pytest.raises(QueueFullError):
                await engine_loop.submit(prompts(3), LONG)
            assert len(await texts(await engine_loop.submit(prompts(2), LONG))) == 2

    asyncio.run(main())


def test_closing_lets_requests_finish_and_takes_no_more():
    async def main() -> None:
        async with looping() as engine_loop:
            answers = await engine_loop.submit(prompts(2), LONG)
            engine_loop.close(PATIENCE)
            assert engine_loop.state == "stopping"
            with pytest.raises(StoppedError, match="shutting down"):
                await engine_loop.submit(prompts(1), LONG)
            assert list((await texts(answers)).values()) == expected(prompts(2))

    asyncio.run(main())


def test_closing_at_once_tells_those_that_run_and_wait():
    async def main() -> None:
        async with looping(max_num_seqs=1) as engine_loop:
            each = [await engine_loop.submit([ids], LONG) for ids in prompts(3)]
            engine_loop.close()
            for answers in each:
                with pytest.raises(StoppedError, match="time to finish is over"):
                    await texts(answers)

    asyncio.run(main())


@pytest.mark.parametrize("moment", ["step", "submit"])
def test_a_thread_that_dies_tells_everyone(moment):
    async def main() -> None:
        engine = Engine(tiny_decoder())
        engine_loop = EngineLoop(engine)
        engine_loop.start()
        answers = await engine_loop.submit(prompts(2), SamplingParams(max_tokens=1))
        await texts(answers)
        if moment == "step":
            engine.step = None  # type: ignore[assignment, method-assign]
            with pytest.raises(EngineError, match="died"):
                await texts(await engine_loop.submit(prompts(1), LONG))
        else:
            engine_loop._commands.put(None)  # type: ignore[arg-type]
            with pytest.raises(EngineError, match="died"):
                await engine_loop.submit(prompts(1), LONG)
        assert engine_loop.state == "dead"
        with pytest.raises(StoppedError, match="restart"):
            await engine_loop.submit(prompts(1), LONG)
        await engine_loop.join()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_what_was_committed_comes_before_the_error(monkeypatch):
    async def main() -> None:
        async with looping() as engine_loop:
            monkeypatch.setattr(engine_loop.engine.decoder, "round", None)
            answers, found = await engine_loop.submit(prompts(1), LONG), []
            with pytest.raises(EngineError, match="TypeError"):
                async for _, chunk in answers:
                    found.append(chunk.text)
            assert found == [expected(prompts(1))[0][0]]

    asyncio.run(main())


def test_an_error_in_submitting_is_the_submitters(monkeypatch):
    async def main() -> None:
        async with looping() as engine_loop:
            with monkeypatch.context() as patch:
                patch.setattr(engine_loop.engine, "submit_all", None)
                with pytest.raises(TypeError):
                    await engine_loop.submit(prompts(1), LONG)
            assert await texts(await engine_loop.submit(prompts(1), LONG)) == dict(enumerate(expected(prompts(1))))

    asyncio.run(main())
