// Redact removes confidential text from the bodies of requests.
package main

import (
	"bufio"
	"errors"
	"io"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/doze-run/doze/policies/sdk"
)

type config struct {
	// Find lists the names of finders.
	Find []string `json:"find"`
	// Patterns are further expressions to find.
	Patterns []pattern `json:"patterns"`
	// Action is "redact" unless it is "deny".
	Action string `json:"action"`
}

// pattern is a regular expression (RE2) with the name that replaces its matches.
type pattern struct {
	Name  string `json:"name"`
	Match string `json:"match"`
}

func init() { sdk.Serve(build) }

func main() {}

const (
	actionRedact = "redact"
	actionDeny   = "deny"
	// maxBody is what the node buffers by default.
	maxBody = 1 << 20
)

func build(c config) (sdk.Policy, error) {
	p := &redact{deny: c.Action == actionDeny}
	for _, name := range slices.Compact(slices.Sorted(slices.Values(c.Find))) { // each once
		i := slices.IndexFunc(finders, func(f finder) bool { return f.name == name })
		if i < 0 {
			return sdk.Policy{}, errors.New(`"find" has "` + name + `", but there are ` + known())
		}
		p.finders = append(p.finders, finders[i])
	}
	for _, given := range c.Patterns {
		e, err := given.compile()
		if err != nil {
			return sdk.Policy{}, err
		}
		p.expressions = append(p.expressions, e)
	}
	switch {
	case len(p.finders)+len(p.expressions) == 0:
		return sdk.Policy{}, errors.New(`"find" names what to take out: ` + known() + `; or there are "patterns"`)
	case c.Action != "" && c.Action != actionRedact && c.Action != actionDeny:
		return sdk.Policy{}, errors.New(`"action" is "redact" or "deny"`)
	}
	return sdk.Policy{Features: sdk.BufferRequest, Request: p.request}, nil
}

// expression is a pattern that was compiled.
type expression struct {
	name string
	re   *regexp.Regexp
}

func (p pattern) compile() (expression, error) {
	if p.Name == "" || strings.ContainsAny(p.Name, "\"\\\r\n") {
		return expression{}, errors.New(`a pattern has a "name", a word or some that stand in place of what matches`)
	}
	re, err := regexp.Compile(p.Match)
	if err != nil {
		return expression{}, errors.New(`pattern "` + p.Name + `": ` + err.Error())
	}
	if re.MatchString("") {
		return expression{}, errors.New(`pattern "` + p.Name + `" matches nothing at all, everywhere`)
	}
	return expression{p.Name, re}, nil
}

type redact struct {
	finders     []finder
	expressions []expression
	deny        bool
}

func (p *redact) request(r *sdk.Request) error {
	for _, e := range r.Header.Values("Content-Encoding") {
		if e != "" && !strings.EqualFold(e, "identity") {
			return sdk.Deny("redact: a compressed body cannot be searched; send it without Content-Encoding")
		}
	}
	if r.Upgrades() {
		return sdk.Deny("redact: what is sent after a change of protocol cannot be searched")
	}
	body, err := r.Body.Bytes(maxBody)
	if err != nil {
		return err
	}
	found := p.search(body)
	switch {
	case len(found) == 0:
		return nil
	case len(found) >= maxSpans:
		return sdk.Deny("redact: the body has too much that would be taken out")
	case p.deny:
		return sdk.Deny("redact: the body has " + count(found))
	}
	sdk.Note("redacted " + count(found))
	return write(&r.Body, body, found)
}

// search returns the findings of finders and expressions, in order and without overlap.
func (p *redact) search(body []byte) []span {
	found := find(body, p.finders)
	for _, e := range p.expressions {
		for _, at := range e.re.FindAllIndex(body, maxSpans) {
			if at[1] > at[0] { // \b alone is empty
				found = append(found, span{at[0], at[1], e.name})
			}
		}
	}
	if len(p.expressions) == 0 {
		return found
	}
	slices.SortStableFunc(found, func(a, b span) int { return a.start - b.start })
	apart := found[:0]
	for _, s := range found {
		if n := len(apart); n > 0 && s.start < apart[n-1].end {
			apart[n-1].end = max(apart[n-1].end, s.end)
		} else {
			apart = append(apart, s)
		}
	}
	return apart
}

// count returns the number of spans of each name.
func count(found []span) string {
	numbers := map[string]int{}
	for _, s := range found {
		numbers[s.name]++
	}
	var texts []string
	for _, name := range slices.Sorted(maps.Keys(numbers)) {
		texts = append(texts, strconv.Itoa(numbers[name])+" "+name)
	}
	return strings.Join(texts, ", ")
}

// write replaces findings with [redacted NAME], which neither JSON nor a form has to escape in
// text. It passes the body to the node in pieces: a second copy might not fit into the
// policy's memory.
func write(w io.Writer, body []byte, found []span) error {
	out := bufio.NewWriterSize(w, 32<<10)
	from := 0
	for _, s := range found {
		out.Write(body[from:s.start])
		out.WriteString("[redacted " + s.name + "]")
		from = s.end
	}
	out.Write(body[from:])
	return out.Flush()
}
