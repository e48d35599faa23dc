// Package requestid names requests, so that a client's error can be found in the
// node's log.
package requestid

import (
	"crypto/rand"
	"net/http"
	"strings"
)

// Header has the id of a request, in requests and in responses.
const Header = "X-Request-Id"

const (
	maxLength = 64
	// length of an id that the node chooses: 80 random bits in an alphabet without
	// ambiguous letters.
	length = 16
)

// Of returns the id that the client chose, or a new one if it chose none or one that
// is not 1 to 64 letters, digits, hyphens, underscores and dots.
func Of(r *http.Request) string {
	if values := r.Header[Header]; len(values) == 1 {
		return Or(values[0])
	}
	return Or("")
}

// Or returns an id that a client chose if Of would, and a new one otherwise.
func Or(id string) string {
	if valid(id) {
		return id
	}
	return rand.Text()[:length]
}

func valid(id string) bool {
	const allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_."
	return id != "" && len(id) <= maxLength && strings.Trim(id, allowed) == ""
}
