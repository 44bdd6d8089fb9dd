// A browser starts no worker from a page on disk, and the search is one. There, an empty frame takes the worker's place:
// its window runs the script, gets what is sent to the worker, and what it posts goes back.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.window = new Promise(resolve => {
        const start = () => {
          document.body.append(frame)
          const inside = frame.contentWindow
          inside.postMessage = data => {
            const message = new MessageEvent("message", { data })
            this.dispatchEvent(message)
            if (this.onmessage) this.onmessage(message)
          }
          const script = inside.document.createElement("script")
          script.src = new URL(url, location.href).href
          script.onload = () => resolve(inside)
          inside.document.body.append(script)
        }
        document.body ? start() : addEventListener("DOMContentLoaded", start)
      })
    }

    postMessage(data) {
      this.window.then(inside => inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {}
  }
}
