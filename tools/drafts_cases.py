"""Three answers that quote their prompt: a summary, a code edit, JSON from a form."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """What is asked, and what a model that can do it answers."""

    name: str
    prompt: str
    answer: str


PASSAGE = """\
The harbour of Sandhaven was built in 1838, after a storm had driven eleven boats on the rocks in one night \
and drowned thirty-one men. The money came from the fishermen themselves, who gave a tenth of every catch \
for nine years, and from the quarry, which gave the stone. The engineer was a young man who had never built \
anything in the sea; he lived in a hut on the beach for four winters and measured the waves with a knotted \
rope. His pier has stood ever since, although the harbour board replaced the upper courses in 1911 and again \
in 1962.

In its best years, between 1870 and 1895, the harbour sheltered a hundred and twenty herring boats, and the \
curing yards employed four hundred women, who came from the islands in June and left in September. The \
herring failed in 1896. Some of the boats were sold to Norway, and the yards stood empty until the war, when \
the navy kept mines in them. Today nine boats fish from Sandhaven for crab and lobster. The harbour board, \
which has three members, raises its money from berths for yachts and from the ice house, and last year it \
had forty thousand pounds left for repairs. A survey in March found that the pier needs a hundred and ten \
thousand.
"""

SUMMARY = """\
The harbour of Sandhaven was built in 1838, after a storm had driven eleven boats on the rocks. The money \
came from the fishermen themselves, who gave a tenth of every catch for nine years, and from the quarry, \
which gave the stone. The engineer was a young man who had never built anything in the sea; his pier has \
stood ever since. In its best years the harbour sheltered a hundred and twenty herring boats, and the curing \
yards employed four hundred women, but the herring failed in 1896. Today nine boats fish from Sandhaven for \
crab and lobster. Last year the harbour board had forty thousand pounds left for repairs, and the pier needs \
a hundred and ten thousand.
"""

CODE = '''\
def read_rows(path):
    """Rows of a CSV file with a header, as dictionaries."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def total(rows, column):
    """The sum of a column."""
    result = 0.0
    for row in rows:
        result += float(row[column])
    return result


def mean(rows, column):
    """The mean of a column."""
    if not rows:
        raise ValueError("no rows")
    return total(rows, column) / len(rows)


def largest(rows, column):
    """The row with the largest value of a column."""
    best = rows[0]
    for row in rows:
        if float(row[column]) > float(best[column]):
            best = row
    return best
'''

EDITED = '''\
def read_rows(path):
    """Rows of a CSV file with a header, as dictionaries."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def total(rows, column):
    """The sum of a column; empty cells count as 0."""
    result = 0.0
    for row in rows:
        result += float(row[column] or 0)
    return result


def mean(rows, column):
    """The mean of a column."""
    if not rows:
        raise ValueError("no rows")
    return total(rows, column) / len(rows)


def largest(rows, column):
    """The row with the largest value of a column; empty cells count as 0."""
    best = rows[0]
    for row in rows:
        if float(row[column] or 0) > float(best[column] or 0):
            best = row
    return best
'''

FORM = """\
Application for a berth

Name of the owner: The Sailing Association of Little Hampton
Address: 27 Church Lane, Little Hampton
Telephone: 01903 555 0142
Name of the boat: Silver Darling
Length: 8.4 metres
Draught: 1.2 metres
Year and place of building: 1974, Macduff Boatbuilding and Engineering
Insurance: Northern Mutual Marine, policy NM-2231-88, until 31 October
Berth wished for: inner basin, north wall
From: 1 April
To: 30 September
Remarks: The boat has no engine at present; please leave room for a tow alongside.
"""

JSON = """\
{
  "owner": "The Sailing Association of Little Hampton",
  "address": "27 Church Lane, Little Hampton",
  "telephone": "01903 555 0142",
  "boat": {
    "name": "Silver Darling",
    "length_m": 8.4,
    "draught_m": 1.2,
    "built": "1974, Macduff Boatbuilding and Engineering"
  },
  "insurance": "Northern Mutual Marine, policy NM-2231-88, until 31 October",
  "berth": "inner basin, north wall",
  "from": "1 April",
  "to": "30 September",
  "remarks": "The boat has no engine at present; please leave room for a tow alongside."
}
"""

KEYS = "owner, address, telephone, boat (name, length_m, draught_m, built), insurance, berth, from, to, remarks"

CASES = (
    Case("summary", f"{PASSAGE}\nA summary of this text:\n\n", SUMMARY),
    Case("code edit", f"{CODE}\nThe same with utf-8, and with empty cells as 0:\n\n", EDITED),
    Case("JSON from a form", f"{FORM}\nThe form as JSON with the keys {KEYS}:\n\n", JSON),
)
