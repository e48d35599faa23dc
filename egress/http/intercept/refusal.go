package intercept

import (
	"net/http"

	"github.com/doze-run/doze/problem"
)

// Refuse sends a problem as the response to a request that was not sent on. Headers
// that were set for another response are dropped, except for Connection: close.
//
// If the header of r may have secrets in it, the problem needs a RequestID: without
// one, the response has r's X-Request-Id.
func Refuse(w http.ResponseWriter, r *http.Request, why *problem.Problem) {
	h := w.Header()
	last := r.ProtoMajor == 1 && (why.Code == problem.RequestAmbiguous || h.Get("Connection") == "close")
	clear(h)
	if last { // the bytes that follow may be the body or another request
		h.Set("Connection", "close")
	}
	why.Write(w, r)
}
