package server

import (
	"fmt"
	"testing"

	"github.com/doze-run/doze/archive"
	"github.com/doze-run/doze/runtime/guest"
)

func TestCodesOfArchiveErrors(t *testing.T) {
	for kind, want := range map[error]string{
		archive.ErrInvalid: guest.CodeInvalid, archive.ErrSpecial: guest.CodeInvalid, archive.ErrUnsafe: guest.CodeUnsafeArchive,
		archive.ErrTooLarge: guest.CodeTooLarge, archive.ErrReserved: guest.CodeNotPermitted,
	} {
		if got := codeOf(fmt.Errorf("unpack: %w", &archive.Error{Kind: kind, Message: "x"})); got != want {
			t.Errorf("%v has the code %q, want %q", kind, got, want)
		}
	}
}
