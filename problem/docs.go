package problem

import (
	"bytes"
	"fmt"
	"io"
	"strings"
)

// docsHeader begins docs/reference/errors.md.
const docsHeader = `<!-- Generated from package problem: go test ./problem -update -->

# Errors

Every error response of a node has a stable code: in the API, in previews, and in responses to refused outgoing requests.
The response is a problem document ([RFC 9457](https://www.rfc-editor.org/rfc/rfc9457)) of type ` + "`" + ContentType + "`" + `. Its header ` + "`" + HeaderError + "`" + ` is the code.
Compare ` + "`code`" + `; ` + "`title`, `detail`, `message` and `hint`" + ` are for people. [The API](api.md#problems) describes the document.

Codes may be added. Handle an unknown code by the class of its status.

Codes are sent by the *API*; by *previews*, to visitors; by *egress*, to programs in sandboxes; and by the *proxy*, to programs
outside of sandboxes. A value under Retry-After is the default of that header, in seconds.
`

// sourceNames of Source, from the lowest bit.
var sourceNames = []string{"API", "previews", "egress", "proxy"}

// String lists the parts, such as "API, previews".
func (s Source) String() string {
	var names []string
	for i, name := range sourceNames {
		if s&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// WriteDocs writes docs/reference/errors.md: a table for each group of codes.
func WriteDocs(w io.Writer) error {
	var b bytes.Buffer
	b.WriteString(docsHeader)
	var group Group
	for _, d := range ordered {
		if d.Group != group {
			group = d.Group
			fmt.Fprintf(&b, "\n## %s\n\n| code | status | Retry-After | sent by | meaning |\n|---|---|---|---|---|\n", group)
		}
		retryAfter := ""
		if d.RetryAfter > 0 {
			retryAfter = fmt.Sprint(d.RetryAfter)
		}
		fmt.Fprintf(&b, "| <a id=%q></a>`%s` | %d | %s | %s | %s. %s |\n", d.Name, d.Name, d.Status, retryAfter, d.From, d.Title, d.Meaning)
	}
	_, err := w.Write(b.Bytes())
	return err
}
