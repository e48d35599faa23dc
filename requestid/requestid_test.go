package requestid

import (
	"net/http"
	"strings"
	"testing"
)

func TestOfAcceptsWellFormedIDsOnly(t *testing.T) {
	for id, accepted := range map[string]bool{
		"a": true, "0f7c-req_1.2": true, strings.Repeat("a", 64): true,
		"": false, strings.Repeat("a", 65): false, "a b": false, "a\nb": false, "é": false, `"`: false, "<b>": false,
	} {
		r := &http.Request{Header: http.Header{Header: {id}}}
		got := Of(r)
		if (got == id) != accepted || !valid(got) {
			t.Errorf("%q became %q", id, got)
		}
	}
	if got := Of(&http.Request{Header: http.Header{Header: {"a", "b"}}}); got == "a" || got == "b" {
		t.Errorf("one of two ids was accepted: %q", got)
	}
	if none := (&http.Request{Header: http.Header{}}); Of(none) == Of(none) {
		t.Error("two requests have the same id")
	}
}
