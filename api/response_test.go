package api

import (
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/doze-run/doze/problem"
)

// A client never takes the failure to encode a response for an empty one.
func TestResponseThatCannotBeEncodedIsAnError(t *testing.T) {
	s := &server{t: t, api: &API{cfg: Config{Log: slog.New(slog.DiscardHandler)}}}
	rec := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodGet, Prefix+"/node", nil)
	w := newTimedWriter(rec, 0)
	func() {
		defer s.api.recover(w, r, "id")
		jsonResponse(Exchange{r, w}, math.NaN()).Body(nil)
	}()
	s.checkProblem(problem.InternalError, "not a number", response{rec.Code, rec.Header(), rec.Body.Bytes()})
}
