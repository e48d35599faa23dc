package intercept

import (
	"net/http"

	"github.com/doze-run/doze/problem"
)

// Refuse sends a problem as the response to a request that was not sent on. Headers
// that were set for another response are dropped.
//
// If the header of r may have secrets in it, the problem needs a RequestID: without
// one, the response has r's X-Request-Id.
func Refuse(w http.ResponseWriter, r *http.Request, why *problem.Problem) {
	clear(w.Header())
	why.Write(w, r)
}
