"""Register of the trial's programs."""

WRONG, SOUND = {}, {}


def wrong(sentence, finding):
    def add(build):
        WRONG[build.__name__] = (build, sentence, finding)
        return build

    return add


def sound(sentence):
    def add(build):
        SOUND[build.__name__] = (build, sentence)
        return build

    return add
