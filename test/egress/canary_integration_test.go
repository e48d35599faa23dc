//go:build integration

package egress

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
)

// shortestCanary in bytes: what is shorter is found by chance.
const shortestCanary = 12

// partCanary in bytes is the length of the parts of a secret that are searched for, at its
// beginning and end, in any case: errors shorten what they repeat.
const partCanary = 16

// canary searches for the secrets of a node in the bytes that sandboxes got and people
// can read: as they are, and in base64 and hexadecimal digits.
type canary struct {
	mu    sync.Mutex
	forms map[start][]form
	// begins has by their hash the starts that there are.
	begins [1 << 16]bool
}

// start is the four bytes with which a form begins, in lower case.
type start uint32

func (s start) then(next byte) start {
	if 'A' <= next && next <= 'Z' {
		next += 'a' - 'A'
	}
	return s<<8 | start(next)
}

func (s start) hash() uint16 { return uint16(uint32(s) * 0x9e3779b1 >> 16) }

// form of a secret that is searched for.
type form struct {
	text    string
	anyCase bool
	name    string
}

// watch adds a value to search for.
func (c *canary) watch(value string) {
	if len(value) < shortestCanary {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	name := fmt.Sprintf("a secret of %d bytes", len(value))
	c.add(form{value, false, name})
	if len(value) > partCanary {
		c.add(form{value[:partCanary], true, "the beginning of " + name})
		c.add(form{value[len(value)-partCanary:], true, "the end of " + name})
	}
	c.add(form{hex.EncodeToString([]byte(value)), true, name + " in hexadecimal"})
	if escaped := url.QueryEscape(value); escaped != value {
		c.add(form{escaped, true, name + " percent-encoded"})
	}
	for before := range 3 {
		// Without the digits that other bytes have a part in.
		digits := base64.RawStdEncoding.EncodeToString(append(make([]byte, before), value...))
		digits = digits[(before*8+5)/6 : (before+len(value))*8/6]
		c.add(form{digits, false, name + " in base64"})
		if other := strings.NewReplacer("+", "-", "/", "_").Replace(digits); other != digits {
			c.add(form{other, false, name + " in base64"})
		}
	}
}

func (c *canary) add(f form) {
	if c.forms == nil {
		c.forms = map[start][]form{}
	}
	var at start
	for i := range 4 {
		at = at.then(f.text[i])
	}
	if !slices.Contains(c.forms[at], f) {
		c.forms[at] = append(c.forms[at], f)
		c.begins[at.hash()] = true
	}
}

// searchText returns which secrets are in a text, each once.
func (c *canary) searchText(where string, text []byte) (found []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.candidates(text, func(at start, rest []byte) {
		for _, f := range c.forms[at] {
			if say := f.name + " is in " + where; f.at(rest) && !slices.Contains(found, say) {
				found = append(found, say)
			}
		}
	})
	return found
}

// candidates calls maybe where a form may begin. The race detector, which would make
// gigabytes of this take minutes, learns nothing here: text is the caller's.
//
//go:norace
func (c *canary) candidates(text []byte, maybe func(at start, rest []byte)) {
	var at start
	for i, b := range text {
		if at = at.then(b); i >= 3 && c.begins[at.hash()] {
			maybe(at, text[i-3:])
		}
	}
}

// at reports whether a text begins with the form.
func (f *form) at(text []byte) bool {
	if len(text) < len(f.text) {
		return false
	}
	start := text[:len(f.text)]
	return string(start) == f.text || f.anyCase && bytes.EqualFold(start, []byte(f.text))
}

// search is searchText for large texts. Secrets that are found are the error.
func (c *canary) search(where string, r io.Reader) error {
	const overlap = 64 << 10 // more than any form has
	buf := make([]byte, 1<<20)
	kept := 0
	for {
		n, err := io.ReadFull(r, buf[kept:])
		if found := c.searchText(where, buf[:kept+n]); len(found) > 0 {
			return errors.New(strings.Join(found, "\n"))
		}
		switch err {
		case nil:
		case io.EOF, io.ErrUnexpectedEOF:
			return nil
		default:
			return err
		}
		kept = copy(buf, buf[len(buf)-overlap:])
	}
}

// search searches the state at the end of the tests: the node's log, its
// home, its metrics and the responses of its API. Secrets that were found anywhere
// are the error.
func (n *node) search() error {
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	errs := []error{n.canary.search("the node's log", n.Output())}
	if n.Runs() {
		errs = append(errs, n.searchAPI(ctx))
	}
	errs = append(errs, filepath.WalkDir(n.Home, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return ignoreGone(err)
		}
		f, err := os.Open(path)
		if err != nil {
			return ignoreGone(err)
		}
		defer f.Close()
		return n.canary.search("the file "+path, f)
	}))
	return errors.Join(errs...)
}

// ignoreGone: a node that runs removes files.
func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (n *node) searchAPI(ctx context.Context) error {
	var errs []error
	for _, path := range []string{"/node", "/secrets", "/egress/rules", "/node/egress/rules", "/egress/proxy/flows", "/policies", "/sandbox"} {
		status, text, err := n.Do(ctx, "GET", path, "", nil)
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("%s responded with %d, which proves nothing", path, status)
		}
		errs = append(errs, err, n.canary.search("the response of "+path, strings.NewReader(text)))
	}
	metrics, err := n.Admin(ctx, "/metrics")
	return errors.Join(append(errs, err, n.canary.search("the metrics", strings.NewReader(metrics)))...)
}

// searchBox searches the responses about a sandbox that is about to be destroyed, and
// everything readable in it.
func (n *node) searchBox(ctx context.Context, id string) error {
	var errs []error
	for _, path := range []string{"", "/egress/flows", "/egress/rules", "/events", "/processes"} {
		_, text, err := n.Do(ctx, "GET", "/sandbox/"+id+path, "", nil)
		errs = append(errs, err, n.canary.search("the response of /sandbox/ID"+path, strings.NewReader(text)))
	}
	return errors.Join(append(errs, n.searchSandbox(ctx, id))...)
}

// checked searches the output of a command in a sandbox for secrets.
func (b *box) checked(command string, r types.ExecResult) {
	b.t.Helper()
	for _, text := range []string{r.Stdout, r.Stderr} {
		for _, found := range b.node.canary.searchText("the output of "+command, plain(text, r)) {
			b.t.Error(found)
		}
	}
}

// plain is what a command wrote, however the API had to put it.
func plain(text string, r types.ExecResult) []byte {
	if r.StdoutEncoding == "base64" || r.StderrEncoding == "base64" {
		if b, err := base64.StdEncoding.DecodeString(text); err == nil {
			return b
		}
	}
	return []byte(text)
}

// The canary's search at the end of the tests is worth as much as it can find.
func TestCanaryFindsSecrets(t *testing.T) {
	const value = "tok-canary-Jq7TzW2nHs5XcVb9"
	in := map[string]string{
		"itself":           "x=" + value + "&",
		"hexadecimal":      hex.EncodeToString([]byte("u:" + value)),
		"upper case":       strings.ToUpper(hex.EncodeToString([]byte(value))),
		"base64":           base64.StdEncoding.EncodeToString([]byte(value + ":x")),
		"base64 after one": base64.StdEncoding.EncodeToString([]byte(":" + value + ":x")),
		"base64 after two": base64.URLEncoding.EncodeToString([]byte("u:" + value)),
		"a part":           strings.ToUpper(value[:partCanary+1]),
		"the end of it":    value[len(value)-partCanary:],
		"two reads":        strings.Repeat("x", 1<<20-5) + value,
	}
	for name, text := range in {
		var c canary
		c.watch(value)
		if err := c.search(name, strings.NewReader(text)); err == nil {
			t.Errorf("%s: it is not found", name)
		}
	}
	var c canary
	c.watch(value)
	if found := c.searchText("nothing", []byte("tok-canary-"+strings.Repeat("*", 16))); len(found) != 0 {
		t.Errorf("found %q", found)
	}
}
