"""What the evidence about scores says, and how many nodes are worth their seconds by it."""


def halvings(score):
    """As foredraft.control.evidence's: how often 1 halves until it is no more than the score, up to 11 times."""
    number = 0
    while number < 11 and score <= 0.5 ** (number + 1) * (1 - 1e-12):
        number += 1
    return number


def chances(evidence):
    """As foredraft.control.evidence's, bin by bin."""
    ratio = (evidence.accepted.sum() + 3.0 * 1.0) / (evidence.promised.sum() + 3.0)
    usual = [0.7 * 0.5**number for number in range(12)]
    scores = [p / s if s > 0 else u for p, s, u in zip(evidence.promised, evidence.seen, usual, strict=True)]
    return [
        (accepted + 24.0 * min(ratio * score, 1.0)) / (seen + 24.0)
        for accepted, seen, score in zip(evidence.accepted, evidence.seen, scores, strict=True)
    ]


def best_count(score, evidence, passes, seconds, depth, cheap):
    """As foredraft.control.evidence's: every count of nodes is tried."""
    chance, (plain, overhead), (least, margin) = chances(evidence), seconds, cheap
    each = [chance[halvings(one)] for one in sorted(score.tolist(), reverse=True)][: len(passes) - 2]
    rates = [(1 + min(sum(each[:n]), depth)) / (passes[n + 1] + overhead) for n in range(1, len(each) + 1)]
    few = min(least, len(rates))
    more = [n for n in range(few + 1, len(rates) + 1) if rates[n - 1] > margin * rates[few - 1]]
    best = max(more, key=lambda n: rates[n - 1], default=few)
    return best if best and rates[best - 1] > 1 / plain else 0


def credit(evidence, score, path):
    """As foredraft.control.evidence's: returns what was seen, accepted and promised afterwards."""
    seen, accepted, promised = (each.tolist() for each in evidence)
    for node, one in enumerate(score.tolist()):
        seen[halvings(one)] += 1
        promised[halvings(one)] += one
        accepted[halvings(one)] += node in path.tolist()
    for number in range(12):
        share = 0.5 if seen[number] > 400 else 1
        seen[number], accepted[number], promised[number] = (share * each[number] for each in (seen, accepted, promised))
    return seen, accepted, promised
