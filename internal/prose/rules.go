package main

import (
	"regexp"
	"slices"
	"strings"
)

// Rule is something not to write.
type Rule struct {
	ID      string
	In      Kind
	Pattern *regexp.Regexp  // of the text in lower case
	Words   map[string]bool // forbidden as words of a name, in place of a pattern
	Unless  func(match) bool
	Instead string // completes "write …"
	Warn    bool   // never fails
}

// match is where a pattern or a word was found.
type match struct {
	unit                *unit
	before, text, after string // in lower case

	words []string // of a name
	index int      // of the word
}

// previous returns the word before a match, without the punctuation between.
func (m match) previous() string {
	const punctuation = " ,;:.()\"'*`"
	before := strings.TrimRight(m.before, punctuation)
	return strings.Trim(before[strings.LastIndex(before, " ")+1:], punctuation)
}

func re(s string) *regexp.Regexp { return regexp.MustCompile(s) }

// Rules that tests or golang.go, which applies those without a pattern, refer to.
var (
	ruleErrorGerund  = &Rule{ID: "error-gerund", In: Error, Instead: "the verb: thaw %s: %w"}
	ruleErrorCapital = &Rule{ID: "error-capital", In: Error, Instead: "a lower-case letter at the beginning"}
	ruleLogGerund    = &Rule{ID: "log-gerund", In: Log, Instead: "an event (sandbox woke) or failed to X"}
	ruleLogForm      = &Rule{ID: "log-form", In: Log, Instead: "failed to X, ignoring X, or an event with its verb"}
	ruleLogCase      = &Rule{ID: "log-case", In: Log, Instead: "a lower-case letter at the beginning"}
	ruleLogConstant  = &Rule{ID: "log-constant", In: Log, Instead: "a constant message, with what varies in attributes"}
	ruleLogKey       = &Rule{ID: "log-key", In: Log, Instead: "a key in snake_case"}
	ruleMethodName   = &Rule{ID: "method-name", In: Name, Instead: "what is ended, found or changed: the name has too many methods"}
	ruleTestkit      = &Rule{ID: "testkit-import", In: Name, Instead: "the code in the test: only tests and packages for them import testkit"}
	// Bold at the beginning of a paragraph, an item or a cell marks a heading.
	ruleGlossary = &Rule{
		ID: "glossary-term", In: Doc, Pattern: re(`\*\*[^*]+\*\*`),
		Unless:  func(m match) bool { return m.before == "" || m.unit.heading },
		Instead: "the term without bold, or define it in " + glossaryFile,
	}
)

const (
	inText  = Prose | TestName
	inNames = Name | File
)

// rules in the order of CONTRIBUTING.md's table.
var rules = []*Rule{
	{
		ID: "nobody", In: inText | Local | Name, Pattern: re(`\bnobody\b`),
		Unless:  func(m match) bool { return m.previous() == "user" || m.previous() == "group" },
		Instead: "the subject: no client, no request, no longer used",
	},
	{ID: "whoever", In: inText, Pattern: re(`\bwho(?:so|m)?ever\b`), Instead: "the caller that, the client that"},
	{
		ID: "who", In: inText, Pattern: re(`\bwho(?:m)?\b`),
		Unless:  func(m match) bool { return persons[m.previous()] || persons[strings.TrimSuffix(m.previous(), "s")] },
		Instead: "the client, the operator, the request: who needs a person before it",
	},
	{ID: "somebody", In: inText | Local | Name, Pattern: re(`\b(?:some|any|every)body\b`), Instead: "a caller, any client, all users"},
	{
		ID: "is-no", In: inText, Pattern: re(`\b(?:is|are|was|were|be|been)\s+no\s+[a-z%"'*]\S*`),
		Unless:  isNoIsFine,
		Instead: "is not a X, invalid X, has no X",
	},
	{
		ID: "no-such", In: inText, Pattern: re(`\bno such\b`),
		// Texts of errno, and of Go's resolver.
		Unless: func(m match) bool {
			return startsWithAny(m.after, " file", " process", " host", " device", " attribute")
		},
		Instead: "unknown X, X does not exist",
	},
	{
		ID: "that-of", In: inText, Pattern: re(`\b(?:that|those) of\b`),
		Unless:  func(m match) bool { return strings.HasPrefix(m.after, " course") },
		Instead: "the owner's X, or the noun again",
	},
	{
		ID: "of-which", In: inText, Pattern: re(`\bof (?:which|whose|whom)\b`),
		Unless:  func(m match) bool { return quantities[m.previous()] },
		Instead: "whose X, or a sentence of its own",
	},
	{
		ID: "is-there", In: inText, Pattern: re(`\b(?:that|which|what) (?:is|are|was|were) (?:already |still |not )?there\b|\b(?:is|are|was|were) (?:already |still |not )?there(?:\s*[.;,:)]|$)`),
		Instead: "exists, is present; existing X",
	},
	{
		ID: "headless-what", In: Prose, Pattern: re(`(?:^|[.!?] )what [^?.;:]*`),
		Unless:  whatIsFine,
		Instead: "the noun: the state that, the bytes that",
	},
	{
		ID: "says", In: inText, Pattern: re(`\b(?:says?|said|saying) (?:whether|that|why|what|how|when|where|which|who|so|if)\b`),
		Instead: "reports whether, returns, describes, documents",
	},
	{ID: "told", In: inText, Pattern: re(`\b(?:tells?|told|telling)\b`), Instead: "report, notify, inform; distinguish"},
	{ID: "hears", In: inText, Pattern: re(`\b(?:hears?|heard|hearing)\b`), Instead: "receives, is notified"},
	{
		ID: "gives-back", In: inText, Pattern: re(`\b(?:gives?|gave|given|giving|puts?|putting|hands?|handed|handing) (?:it |them |\w+ \w+ )?back\b`),
		Instead: "release, return, restore",
	},
	{
		ID: "for-ever", In: inText, Pattern: re(`\bfor (?:ever\b|good\b)`),
		Unless:  func(m match) bool { return startsWithAny(m.after, " reason", " measure", " cause") },
		Instead: "permanently, indefinitely",
	},
	{ID: "at-once", In: inText, Pattern: re(`\bat once\b`), Instead: "immediately; concurrently, at the same time"},
	{ID: "beside", In: inText, Pattern: re(`\bbeside\b`), Instead: "next to, in addition to, in parallel with"},
	{
		ID: "archaic", In: inText, Pattern: re(`\b(?:amiss|lately|wholly|thereby|mend(?:s|ed|ing)?|thus|whence|therein|thereof|whereof|nought|naught|lest|ere)\b`),
		Instead: "wrong, recently, entirely, repair, so: plain modern words",
	},
	{ID: "he", In: inText, Pattern: re(`\b(?:he|his|him|himself|she|her|hers|herself)\b`), Instead: "it, its, they, their"},
	{
		ID: "has-it", In: inText, Pattern: re(`\b(?:has|have|had|having) (?:it|them|itself|themselves) (?:\w+ed|do|done|make|made|send|sent|run|read|write|written|know|known|be|go|start|stop|wake|sleep|built|given|set|kept|put|say|said|wait)\b`),
		Instead: "makes X do, requests X; an active verb",
	},
	{ID: "anew", In: inText | Local | Name, Pattern: re(`\banew\b|\bonce more\b`), Instead: "again"},
	{ID: "look-at", In: inText, Pattern: re(`\blook(?:s|ed|ing)? (?:at|for|into|after|upon)\b`), Instead: "inspect, search, poll, read"},
	{
		ID: "answers", In: inText, Pattern: re(`\banswer(?:s|ed|ing)?\b`),
		Unless:  answersQuestion,
		Instead: "responds, response (DNS alone has answers)",
	},
	{ID: "kept", In: Prose, Warn: true, Pattern: re(`\b(?:kept|keeps?)\b`), Instead: "stored, cached, retained"},
	{
		ID: "spelling", In: inText | Local | Name, Pattern: re(`\b(?:dial|cancel|label|model|signal|travel|channel|tunnel|marshal|unmarshal|level|total|equal|fuel|panel)l(?:ed|ing|er|ers)\b` +
			`|\b(?:behaviour|colour|honour|favour|neighbour|flavour|harbour|rumour|armour|labour)(?:s|ed|ing|able|al|ite)?\b` +
			`|\b(?:recogn|normal|author|organ|minim|maxim|optim|initial|serial|summar|util|synchron|categor|custom|final|general|priorit|special|standard|token|visual|central|local|real|emphas|apolog|critic|material|neutral|stabil|random|sanit)is(?:e|ed|es|er|ers|ing|ation|ations)\b` +
			`|\b(?:centre|centred|licence|licences|grey|catalogue|catalogues|programme|programmes|whilst|amongst|artefacts?|analyse[ds]?|analysing|defence|offence)\b`),
		Instead: "US spelling: dialed, canceled, recognized, behavior",
	},
	{
		ID: "name", In: inNames,
		Words: wordSet(`turn turns room rooms place places take takes taken leave leaves give gives given tell tells told said asked opened
			keep keeps kept rest look looks greet outside sender senders member members way ways along answer answers deaf frost inside
			anyway worse lives ail ails whose`),
		Unless:  nameIsFine,
		Instead: "the field's term: acquire, release, quota, slot, response, report, stored, poll, route",
	},
	{
		ID: "name-local", In: Local, Words: wordSet(`told said deaf frost worse lives ail ails whose`),
		Instead: "the field's term: reported, parsed, result",
	},
	ruleMethodName, ruleErrorGerund, ruleErrorCapital, ruleLogForm, ruleLogGerund, ruleLogCase, ruleLogConstant, ruleLogKey, ruleGlossary, ruleTestkit,
}

// exception is a text that a rule must not apply to, such as a quoted protocol.
type exception struct {
	path string // of a file, or with a slash at the end of all files below a folder
	rule string
	text string // a part of the paragraph, string or name, in lower case
}

var exceptions = []exception{
	{"runtime/store/logger.go", "log-constant", "a call"}, // the messages are those that Badger logs
	{"runtime/podman/", "no-such", "no such image"},       // an error text of Podman
	{"api/types/event.go", "name", "portopened"},          // of the event port_opened
	{"runtime/sandbox/types.go", "name", "portopened"},
}

// covers reports whether a finding is excepted.
func (e exception) covers(f Finding) bool {
	inside := e.path == f.Path || strings.HasSuffix(e.path, "/") && strings.HasPrefix(f.Path, e.path)
	return inside && e.rule == f.Rule.ID && strings.Contains(strings.ToLower(f.Context), e.text)
}

// persons may be followed by who.
var persons = wordSet(`client caller owner user operator visitor author agent attacker program people person anyone someone everyone those
	reader developer engineer administrator admin maintainer one customer`)

// quantities may be followed by "of which".
var quantities = wordSet(`one two three four five both most some many each all none any half part either neither few several first last least`)

func startsWithAny(s string, prefixes ...string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(s, p) })
}

var (
	thereBefore = re(`\bthere(?:'s|\s+(?:can|must|may|might|will|would|shall|should|has|have|had|to|need|never|still|then|also|simply|\w+ly))*\s*$`)
	comparative = re(`\sno\s+(?:longer|more|less|fewer|different|sooner|later|earlier|further|farther|better|worse|larger|smaller|bigger|higher|lower|faster|slower|greater|wider|shorter|older|newer|other|\w+er than)\b`)
)

// isNoIsFine: "there is no X", "is no longer".
func isNoIsFine(m match) bool {
	return thereBefore.MatchString(m.before) || comparative.MatchString(m.text+m.after[:min(len(m.after), 20)])
}

// whatIsFine: a question, or a heading.
func whatIsFine(m match) bool {
	return m.unit.heading || strings.HasPrefix(m.after, "?")
}

var (
	dnsPath = re(`(?:^|/)dns(?:/|[._])|^egress/names|/bypass_names`)
	dnsText = re(`\bdns\b|\bquer(?:y|ies)\b|\bquestions?\b|\bname servers?\b|\bresolv\w+|\bnxdomain\b|\bservfail\b|\baaaa\b|\becho\b|\bttls?\b|\bphone\b`)
)

// answersQuestion: DNS has answers, as have questions.
func answersQuestion(m match) bool {
	return dnsPath.MatchString(m.unit.path) || dnsText.MatchString(asciiLower(m.unit.text))
}

// nameIsFine: words that are a term together with the next one, and answers of DNS.
func nameIsFine(m match) bool {
	next := ""
	if m.index+1 < len(m.words) {
		next = m.words[m.index+1]
	}
	switch m.words[m.index] {
	case "keep":
		return next == "alive" || next == "alives" || next == "awake"
	case "look":
		return next == "up" || next == "ahead"
	case "take":
		return next == "over"
	case "answer", "answers":
		return dnsPath.MatchString(m.unit.path)
	case "turn":
		return next == "off" || next == "on"
	}
	return false
}
