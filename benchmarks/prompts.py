"""Prompts of a known length that no prefix cache has seen before.

A prompt is a pure function of its key. Words are common English ones, about one token each in most
vocabularies; the exact count comes from the server's usage figures.
"""

import random

_VOCABULARY = """
able about above after again air all also always animal answer apple area around ask autumn away
baby back ball bank base beach bear bed before bell below bird black blue board boat body bone
book both box boy bread break bridge bring brother brown build bus busy call camp can capital car
card care carry case cat catch cause center chair chance change child choose circle city class
clean clear climb clock close cloud coat cold color come cook cool copy corn corner count country
course cover cow cross cry cup cut dance dark day deep desk different dinner direct doctor dog
door down draw dream dress drink drive drop dry duck each ear early earth east easy eat edge egg
eight end engine enjoy enough enter even evening every example eye face fact fall family far farm
fast father feel field fight fill find fine finger finish fire first fish five floor flower fly
follow food foot forest form forward four free fresh friend front fruit full game garden gate girl
give glass gold good grass gray great green ground group grow guess hair half hall hand happy hard
hat head hear heart heavy help high hill hold hole home hope horse hot hotel hour house hundred
ice idea inch island job join jump just keep key kind king kitchen know lake land large last late
laugh law lead leaf learn leave left leg length less letter life light line lion list listen
little live long look low lunch machine mail main make man many map mark market meal mean measure
meat meet middle mile milk mind minute money month moon more morning most mother mountain mouth
move much music name near neck need never new next night nine noise north nose note number ocean
offer office often oil old one open orange order other over own page paint paper park part party
pass path pay pen people person picture piece place plain plan plane plant play point pool poor
post power present price pull push put queen question quick quiet rain reach read ready real
record red rest rice rich ride right ring river road rock room root rope rose round row rule run
sail salt same sand school sea season seat second see seed sell send sentence set seven shape
share sharp sheep ship shirt shoe shop short show side sign silver sing sister sit six size skin
sky sleep slow small smile snow soft soil some song soon sound south space speak spring square
stand star start state station stay steel step stick stone stop store storm story street strong
student study sugar summer sun table tail take talk tall teach team tell ten test thank thick thin
thing think third three tie time today together tomorrow tooth top touch town train travel tree
trip true try turn twenty two uncle under until use valley village voice wait walk wall want warm
wash watch water wave way wear weather week well west wheel white whole wide wild wind window
winter wish woman wonder wood word work world write year yellow yes young
"""
_WORDS = _VOCABULARY.split()


def words(count: int, *key: object) -> str:
    """`count` words, chosen by the key alone."""
    chooser = random.Random("/".join(map(str, key)))
    return " ".join(chooser.choice(_WORDS) for _ in range(count))
