"""Reference counts of the pages of the key/value cache, and prefix caching.

A page has the keys and values of a fixed number of consecutive tokens, in all layers. This
module handles page numbers only, no memory. A complete page is published under a hash of its
tokens and of all earlier tokens, and a later request with the same prefix shares the page.
Published pages without a user are kept until pages are needed; the least recently used page is
evicted first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from struct import pack

Key = bytes
"""Hash of a page's tokens and of all tokens before them."""


FIRST_KEY: Key = bytes(32)
"""Key before the first page."""


def next_key(key: Key, tokens: Sequence[int]) -> Key:
    """Return the key of a complete page: SHA-256 of the previous key and the page's tokens.

    Tokens are hashed as little-endian 64-bit integers, as Megatron's engine does.
    """
    return hashlib.sha256(key + pack(f"<{len(tokens)}q", *tokens)).digest()


class PagePool:
    """Allocates pages, counts the users of each page, and finds published pages by key.

    Attributes:
        num_pages: pages in memory, numbered from 0.
        page_tokens: tokens in a page.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self._users = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._key: dict[int, Key] = {}  # of each published page
        self._page: dict[Key, int] = {}  # published page of each key
        self._unused: OrderedDict[int, None] = OrderedDict()  # published, oldest first

    @property
    def num_free(self) -> int:
        """Number of pages that ``take`` can return, including published pages without users."""
        return len(self._free) + len(self._unused)

    def num_users(self, page: int) -> int:
        """Return the number of requests that use a page."""
        return self._users[page]

    def take(self) -> int:
        """Allocate a page for one user; if no page is free, evict a published page."""
        assert self.num_free, "all pages are used"
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._unused.popitem(last=False)
            del self._page[self._key.pop(page)]
        self._users[page] = 1
        return page

    def share_prefix(self, keys: Iterable[Key]) -> list[int]:
        """Return the published pages of a text's first keys, and add a user to each page."""
        pages = []
        for key in keys:
            page = self._page.get(key)
            if page is None:
                break
            if not self._users[page]:
                del self._unused[page]
            self._users[page] += 1
            pages.append(page)
        return pages

    def publish(self, page: int, key: Key) -> None:
        """Publish a complete page, unless a page with the same key is published."""
        if key not in self._page and page not in self._key:
            self._page[key], self._key[page] = page, key

    def release(self, pages: Sequence[int]) -> None:
        """Remove one user from each page of a request.

        Args:
            pages: pages in the order of the text.
        """
        # The last pages become unused first, so that a page is never evicted before the pages
        # that continue its prefix.
        for page in reversed(pages):
            assert self._users[page] > 0, f"page {page} is released twice"
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._key:
                self._unused[page] = None
            else:
                self._free.append(page)

    def forget_prefixes(self) -> None:
        """Unpublish all pages, after the weights have changed; unused ones become free."""
        for page in self._unused:
            self._free.append(page)
        self._unused.clear()
        self._key.clear()
        self._page.clear()
