"""`EngineLoop`: the thread that owns an `Engine`, so that asyncio code can use it.

    engine_loop = EngineLoop(engine)
    engine_loop.start()  # inside the event loop
    answers = await engine_loop.submit([prompt_ids], params)
    async for index, chunk in answers:
        ...

Commands go into the thread through a queue, on which it sleeps while there is nothing to decode. What a step yields
comes back in one call into the event loop, however many requests it concerns: the threads compete for the interpreter.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Literal

from dcoco.engine import Engine, Request
from dcoco.errors import EngineError, StoppedError
from dcoco.output import Chunk
from verifier.sampling import SamplingParams

State = Literal["ok", "stopping", "dead"]
News = tuple[int, Chunk] | Exception

logger = logging.getLogger(__name__)


class Answers:
    """All answers to one call as they come: iterate for (index, chunk), and close it, finished or not.

    Answer i of prompt p has the index p * n + i. The last chunk of each holds its output. Raises the error of the first
    request that fails: EngineError, or StoppedError where the loop has been closed.
    """

    def __init__(self, engine_loop: "EngineLoop", count: int, whole: bool):
        self.begun = time.perf_counter()
        self.whole = whole
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tickets: list[Ticket] = []  # the engine thread's
        self._engine_loop = engine_loop
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._unfinished = count

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        while self._unfinished:
            news = await self._news.get()
            if isinstance(news, Exception):
                raise news
            self._unfinished -= news[1].output is not None
            yield news

    def close(self) -> None:
        """Free the rows of what is unfinished; nothing more will come."""
        self._engine_loop.forget(self)

    def put(self, news: News | None) -> None:
        """What the engine thread has to say, in the event loop; None: the requests have been accepted."""
        if not self.accepted.done():
            if isinstance(news, Exception):
                self.accepted.set_exception(news)
            else:
                self.accepted.set_result(None)
        if news is not None:
            self._news.put_nowait(news)


class Ticket:
    """One request on its way through the loop, for those who keep count of what it gets."""

    def __init__(self, request: Request, answers: Answers, index: int):
        self.request = request
        self.answers = answers
        self.index = index
        self.begun = answers.begun  # when it was submitted; times are time.perf_counter's
        self.latest = answers.begun  # when it got its latest tokens
        self.tokens = 0  # how many it had then
        self.rounds = self.draft_tokens = self.accepted_tokens = self.committed_tokens = 0  # and its statistics


class EngineLoop:
    """Runs an engine in a thread of its own. All methods are for the event loop in which `start` was called.

    Args:
        engine: from now on the thread's: only its numbers may be read from elsewhere.
        observe: called in the thread with a ticket, the time and the new tokens, whenever a request gets something or
            ends. The ticket still shows the state before.
    """

    def __init__(self, engine: Engine, observe: Callable[[Ticket, float, int], None] | None = None):
        self.engine = engine
        self.error: BaseException | None = None  # what the thread died of
        self._observe = observe
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._closing = False
        self._open: set[Answers] = set()
        # What follows is the thread's.
        self._deadline = math.inf  # finite once it is to end
        self._tickets: dict[Request, Ticket] = {}
        self._news: list[tuple[Answers, News | None]] = []

    # -------------------------------------------------------------------------------------------- the event loop's

    def start(self) -> None:
        """Start the thread."""
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def state(self) -> State:
        """Whether requests are taken: "ok", or why not."""
        return "dead" if self.error else "stopping" if self._closing else "ok"

    async def submit(self, prompts: Sequence[list[int]], params: SamplingParams, whole: bool = False) -> Answers:
        """Queue `params.n` requests for each prompt, all or none; `whole` asks for one chunk each, when it is finished.

        Raises:
            ParameterError, QueueFullError: as `Engine.submit`.
            StoppedError: the loop is closed, or its thread has died.
        """
        self.check()
        answers = Answers(self, len(prompts) * params.n, whole)
        self._open.add(answers)
        self._commands.put(partial(self._submit, answers, list(prompts), params))
        try:
            await answers.accepted
        except BaseException:
            answers.close()
            raise
        return answers

    def check(self) -> None:
        """Raise StoppedError where no request is taken."""
        if self.error is not None:
            raise StoppedError(f"the engine has died of {self.error!r}: restart the server")
        if self._closing:
            raise StoppedError("the server is shutting down: try again later")

    def forget(self, answers: Answers) -> None:
        """Cancel what is unfinished of these answers; nothing happens the second time."""
        if answers in self._open:
            self._open.discard(answers)
            self._commands.put(partial(self._cancel, answers))

    def close(self, grace: float = 0.0) -> None:
        """Take no more requests; those that haven't finished in `grace` seconds fail with StoppedError."""
        if not self._closing:
            self._closing = True
            self._commands.put(partial(self._end_by, time.monotonic() + grace))

    async def join(self) -> None:
        """Wait for the thread to end, after `close`."""
        await asyncio.to_thread(self._thread.join)

    def _deliver(self, news: list[tuple[Answers, News | None]]) -> None:
        for answers, piece in news:
            answers.put(piece)

    def _bury(self, error: BaseException) -> None:
        """The thread has died: whoever waits learns it, and from now on `check` says so."""
        self.error = error
        for answers in list(self._open):
            answers.put(EngineError(f"the engine has died of {error!r}; the request is lost"))

    # ------------------------------------------------------------------------------------------------ the thread's

    def _run(self) -> None:
        try:
            while True:
                self._obey()
                if time.monotonic() >= self._deadline:
                    self._abandon()
                if self.engine.busy:
                    self._collect(self.engine.step())
                self._hand_over()
                if self._deadline < math.inf and not self.engine.busy:
                    return
        except BaseException as error:
            logger.exception("the engine thread has died")
            with suppress(RuntimeError):  # the event loop has ended too
                self._event_loop.call_soon_threadsafe(self._bury, error)

    def _obey(self) -> None:
        """Carry out the commands that wait; sleep until there is one if nothing is to be decoded."""
        sleep = not self.engine.busy
        with suppress(Empty):
            while True:
                self._commands.get(block=sleep)()
                sleep = False

    def _submit(self, answers: Answers, prompts: list[list[int]], params: SamplingParams) -> None:
        requests: list[Request] = []
        try:
            for ids in prompts:
                requests += self.engine.submit_all(ids, params)
        except Exception as error:
            for request in requests:
                self.engine.cancel(request)
            self._news.append((answers, error))
            return
        answers.tickets = [Ticket(request, answers, index) for index, request in enumerate(requests)]
        self._tickets |= {ticket.request: ticket for ticket in answers.tickets}
        self._news.append((answers, None))

    def _cancel(self, answers: Answers) -> None:
        for ticket in answers.tickets:
            if ticket.request in self._tickets:
                self.engine.cancel(ticket.request)
                self._note(ticket, time.perf_counter())

    def _end_by(self, deadline: float) -> None:
        self._deadline = deadline

    def _abandon(self) -> None:
        """The time to finish is over."""
        for ticket in list(self._tickets.values()):
            self.engine.cancel(ticket.request)
            self._note(ticket, time.perf_counter())
            message = "the server is shutting down and the time to finish is over: send the request again later"
            self._news.append((ticket.answers, StoppedError(message)))

    def _collect(self, progressed: list[Request]) -> None:
        """Take what a step has yielded."""
        now = time.perf_counter()
        for request in dict.fromkeys(progressed):
            ticket = self._tickets[request]
            self._note(ticket, now)
            if request.output is not None or not ticket.answers.whole:
                self._news.append((ticket.answers, (ticket.index, request.take())))
            if request.error is not None:
                self._news.append((ticket.answers, request.error))

    def _note(self, ticket: Ticket, now: float) -> None:
        request, stats = ticket.request, ticket.request.stats
        new = len(request.token_ids) - ticket.tokens
        if self._observe is not None:
            self._observe(ticket, now, new)
        if new:
            ticket.latest, ticket.tokens = now, len(request.token_ids)
        ticket.rounds, ticket.draft_tokens = stats.rounds, stats.draft_tokens
        ticket.accepted_tokens, ticket.committed_tokens = stats.accepted_tokens, stats.committed_tokens
        if request.done:
            del self._tickets[request]

    def _hand_over(self) -> None:
        if self._news:
            self._event_loop.call_soon_threadsafe(self._deliver, self._news)
            self._news = []
